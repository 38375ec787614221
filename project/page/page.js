// The sliders of a run: its schedule is simulated again from its measured seconds. Every run has a
// section with its data in JSON, which project/report.py writes; the choice is in the page's URL.
"use strict";

// "F0.1 B0.1|F0.0": per rank, actions with micro-batch and stage.
function decode(text) {
  return text.split("|").map((row) => row.split(" ").map((word) => {
    const [microbatch, stage] = word.slice(1).split(".").map(Number);
    return [word[0], stage, microbatch];
  }));
}

// Per stage of a schedule, its rank's part of what the stages of the run have. The same stages keep
// their own; if a rank has another number of them, they share equally.
function perStage(values, from, to) {
  if (from.length === to.length) return [...values];
  const has = (ranks, rank) => ranks.filter((other) => other === rank).length;
  const sum = (rank) => values.filter((_, stage) => from[stage] === rank).reduce((a, b) => a + b, 0);
  return to.map((rank) => sum(rank) / has(to, rank));
}

// What simulate() takes. A batch takes as long as measured, however it is cut; a message, too.
function workOf(run, choice, schedule) {
  const ranks = [];
  schedule.forEach((row, rank) => row.forEach(([, stage]) => { ranks[stage] = rank; }));
  const layers = run.layers.length ? perStage(run.layers, run.ranks, ranks) : ranks.map(() => 1);
  const { F, B, I, W } = run.batch;
  const half = (parts, stage) => parts[stage] || B[stage] / 2; // a whole backward has equal halves
  const batch = { F, I: B.map((_, s) => half(I, s)), W: B.map((_, s) => half(W, s)), R: run.recompute };
  const [giver, taker] = moved(choice.move);
  for (const kind of "FIWR") {
    batch[kind] = perStage(batch[kind], run.ranks, ranks);
    if (Math.max(giver, taker) >= ranks.length || giver < 0) continue;
    const part = batch[kind][giver] / Math.max(1, layers[giver]);
    batch[kind][giver] -= part;
    batch[kind][taker] += part;
  }
  batch.B = batch.I.map((seconds, stage) => seconds + batch.W[stage]);
  const chunks = ranks.length / schedule.length;
  return {
    seconds: (kind, stage) => batch[kind][stage] / choice.m,
    recompute: (stage) => batch.R[stage] / choice.m,
    transfer: () => run.transfer,
    exchange: () => run.exchange / chunks,
    update: () => run.update,
    overlap: true,
    overlapExchange: false,
  };
}

// The stage that gives a layer and the one that takes it: 1 is 0 to 1, -1 is 1 to 0.
function moved(move) {
  return move > 0 ? [move - 1, move] : move < 0 ? [-move, -move - 1] : [-1, -1];
}

function draw(svg, step, seconds) {
  const box = (x, y, width, name, text) =>
    `<rect class="${name}" x="${x}" y="${y}" width="${width}" height="20"/>` +
    (width > 8 * text.length ? `<text x="${x + width / 2}" y="${y + 14}">${text}</text>` : "");
  const at = (time) => Number((1000 * time / seconds).toFixed(1));
  svg.setAttribute("viewBox", `-80 0 1110 ${24 * step.rows.length + 4}`);
  svg.innerHTML = step.rows.map((row, rank) => {
    const y = 24 * rank + 2;
    const boxes = row.map(({ action: [kind, , microbatch], start, end }) =>
      box(at(start), y, at(end - start), `kind ${kind}`, kind + microbatch));
    const last = row[row.length - 1].end;
    boxes.push(box(at(last), y, at(step.updated[rank] - last), "kind after", ""));
    return `<text class="name" x="-8" y="${y + 14}">rank ${rank}</text>${boxes.join("")}`;
  }).join("");
}

function show(section, run, key) {
  const [m, schedule, move] = ["m", "schedule", "move"].map((name) => section.querySelector(`[name=${name}]`));
  const sizes = () => Object.keys(run.lists[schedule.value]).map(Number);
  const own = { m: run.m, schedule: run.schedule, move: 0 };
  const simulated = (choice) => {
    const lists = decode(run.lists[choice.schedule][choice.m]);
    return simulate(lists, workOf(run, choice, lists));
  };
  const update = () => {
    m.max = sizes().length - 1;
    const choice = { m: sizes()[m.value], schedule: schedule.value, move: Number(move.value) };
    const step = simulated(choice);
    const [giver, taker] = moved(choice.move);
    const text = (name, value) => { section.querySelector(`[data-of=${name}]`).textContent = value; };
    const ms = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
    const percent = (part) => `${(100 * part).toFixed(1)} %`;
    text("m", choice.m);
    text("move", choice.move ? `one, from stage ${giver} to stage ${taker}` : "none");
    text("result", `${ms(step.seconds)} a step, ${percent(step.bubble)} bubble; as it ran: predicted ` +
      `${ms(simulated(own).seconds)}, measured ${ms(run.measured)}, ${percent(run.bubble)} bubble.`);
    draw(section.querySelector("svg.what-if"), step, Math.max(step.seconds, run.measured));
    const state = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(choice)) {
      if (value === own[name]) state.delete(key + name);
      else state.set(key + name, value);
    }
    history.replaceState(null, "", `#${state}`);
  };
  const restore = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    const wanted = (name) => state.get(key + name) ?? own[name];
    schedule.value = wanted("schedule") in run.lists ? wanted("schedule") : own.schedule;
    m.max = sizes().length - 1;
    m.value = Math.max(0, sizes().indexOf(Number(wanted("m"))));
    move.value = wanted("move");
    update();
  };
  schedule.addEventListener("input", () => { // as many micro-batches, or the most below
    const before = Number(section.querySelector("[data-of=m]").textContent);
    m.max = sizes().length - 1;
    m.value = Math.max(0, sizes().filter((size) => size <= before).length - 1);
    update();
  });
  [m, move].forEach((control) => control.addEventListener("input", update));
  window.addEventListener("hashchange", restore);
  section.querySelector(".simulated").hidden = false;
  restore();
}

document.querySelectorAll("section.run").forEach((section, k) => {
  const data = section.querySelector("script[type='application/json']");
  if (data) show(section, JSON.parse(data.textContent), `${k}.`);
});
