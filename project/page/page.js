// The sliders of a run: its schedule is simulated again from its measured seconds. Every run has a
// form with its data in JSON, which project/report.py writes; the choice is in the page's URL.
"use strict";

// The rank that gives a layer and the one that takes it: 1 is 0 to 1, -1 is 1 to 0, 0 none.
function moved(move) {
  return move > 0 ? [move - 1, move] : move < 0 ? [-move, -move - 1] : [0, 0];
}

// What simulate() takes. A batch takes as long as measured, however it is cut; a message, too. Layers
// and stages of a rank are alike.
function workOf(run, schedule, m, move) {
  const rankOf = [];
  schedule.forEach((row, rank) => row.forEach(([, stage]) => { rankOf[stage] = rank; }));
  const chunks = rankOf.length / schedule.length;
  const [giver, taker] = moved(move);
  const part = (kind, stage) => {
    const rank = rankOf[stage];
    const layer = run.batch[kind][giver] / run.layers[giver];
    const more = Number(rank === taker) - Number(rank === giver);
    return (run.batch[kind][rank] + more * layer) / chunks / m;
  };
  return {
    seconds: (kind, stage) => kind === "B" ? part("I", stage) + part("W", stage) : part(kind, stage),
    recompute: (stage) => part("R", stage),
    transfer: run.transfer,
    exchange: run.exchange,
    update: run.update,
  };
}

function draw(svg, step, seconds) {
  const at = (time) => Number((1000 * time / seconds).toFixed(1));
  const box = (rank, start, end, name, text) => {
    const [x, y, width] = [at(start), 24 * rank + 2, at(end - start)];
    const number = width > 8 * text.length ? `<text x="${x + width / 2}" y="${y + 14}">${text}</text>` : "";
    return `<rect class="${name}" x="${x}" y="${y}" width="${width}" height="20"/>${number}`;
  };
  svg.setAttribute("viewBox", `-60 0 1062 ${24 * step.rows.length + 4}`);
  svg.innerHTML = step.rows.map((row, rank) => {
    const boxes = row.map(({ action: [kind, , microbatch], start, end }) =>
      box(rank, start, end, kind, kind + microbatch));
    boxes.push(box(rank, row[row.length - 1].end, step.updated[rank], "after", ""));
    return `<text class="name" x="-30" y="${24 * rank + 16}">rank ${rank}</text>${boxes.join("")}`;
  }).join("");
}

document.querySelectorAll("form.what-if").forEach((form, k) => {
  const run = JSON.parse(form.querySelector("script").textContent);
  const { schedule, m, move, said } = form.elements;
  const simulated = () => {
    const lists = run.lists[schedule.value][m.value];
    return simulate(lists, workOf(run, lists, Number(m.value), Number(move.value)));
  };
  const describe = (seconds, bubble) => `${(1e3 * seconds).toFixed(1)} ms, ${(100 * bubble).toFixed(1)} % bubble`;
  const before = simulated();
  const state = () => new URLSearchParams(location.hash.slice(1));
  const controls = [schedule, m, move].map((control) => ({ control, own: control.value, key: `${k}.${control.name}` }));
  for (const { control, own, key } of controls) {
    control.value = state().get(key) ?? own;
    if (control.value === "") control.value = own; // the URL names no such schedule
  }
  const refresh = () => {
    const step = simulated();
    const [giver, taker] = moved(Number(move.value));
    const cut = giver === taker ? "cut as it was" : `one layer moved from rank ${giver} to rank ${taker}`;
    said.value = `${schedule.value}, ${m.value} micro-batches, ${cut}: ${describe(step.seconds, step.bubble)}. ` +
      `As it ran: simulated ${describe(before.seconds, before.bubble)}, measured ${describe(run.measured, run.bubble)}.`;
    draw(form.querySelector("svg"), step, Math.max(step.seconds, run.measured));
    const chosen = state();
    for (const { control, own, key } of controls) {
      chosen.delete(key);
      if (control.value !== own) chosen.set(key, control.value);
    }
    history.replaceState(null, "", `#${chosen}`);
  };
  form.addEventListener("input", refresh);
  form.hidden = false;
  refresh();
});
