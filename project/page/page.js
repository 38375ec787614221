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
    if (giver === taker) continue;
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

// The stage that gives a layer and the one that takes it: 1 is 0 to 1, -1 is 1 to 0, 0 none.
function moved(move) {
  return move > 0 ? [move - 1, move] : move < 0 ? [-move, -move - 1] : [0, 0];
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

// The choice of a run, from the page's URL and the controls; what differs from the run goes to the URL.
function show(section, run, key) {
  const control = (name) => section.querySelector(`[name=${name}]`);
  const write = (name, text) => { section.querySelector(`[data-of=${name}]`).textContent = text; };
  const ms = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
  const percent = (part) => `${(100 * part).toFixed(1)} %`;
  const own = { m: run.m, schedule: run.schedule, move: 0 };
  const given = new URLSearchParams(location.hash.slice(1));
  const choice = {
    m: Number(given.get(`${key}m`) ?? own.m),
    schedule: given.get(`${key}schedule`) in run.lists ? given.get(`${key}schedule`) : own.schedule,
    move: Number(given.get(`${key}move`)) || 0,
  };
  const simulated = ({ m, schedule, move }) => {
    const lists = decode(run.lists[schedule][m]);
    return simulate(lists, workOf(run, { m, move }, lists));
  };
  const before = simulated(own);
  const refresh = () => {
    const sizes = Object.keys(run.lists[choice.schedule]).map(Number);
    choice.m = sizes.filter((size) => size <= choice.m).pop() ?? sizes[0];
    control("schedule").value = choice.schedule;
    control("m").max = sizes.length - 1;
    control("m").value = sizes.indexOf(choice.m);
    const last = Math.max(...decode(run.lists[choice.schedule][choice.m]).flat().map(([, stage]) => stage));
    Object.assign(control("move"), { min: -last, max: last, value: choice.move });
    choice.move = Number(control("move").value); // within its range
    const step = simulated(choice);
    const [giver, taker] = moved(choice.move);
    write("m", choice.m);
    write("move", choice.move ? `one, from stage ${giver} to stage ${taker}` : "none");
    write("result", `${ms(step.seconds)} a step, ${percent(step.bubble)} bubble; as it ran: predicted ` +
      `${ms(before.seconds)}, measured ${ms(run.measured)}, ${percent(run.bubble)} bubble.`);
    draw(section.querySelector("svg.what-if"), step, Math.max(step.seconds, run.measured));
    const state = new URLSearchParams(location.hash.slice(1));
    for (const name in own) {
      state.delete(key + name);
      if (choice[name] !== own[name]) state.set(key + name, choice[name]);
    }
    history.replaceState(null, "", `#${state}`);
  };
  const changed = (name, read) => control(name).addEventListener("input", (event) => {
    choice[name] = read(event.target.value);
    refresh();
  });
  changed("schedule", String);
  changed("move", Number);
  changed("m", (index) => Number(Object.keys(run.lists[choice.schedule])[index]));
  section.querySelector(".simulated").hidden = false;
  refresh();
}

document.querySelectorAll("section.run").forEach((section, k) => {
  const data = section.querySelector("script[type='application/json']");
  if (data) show(section, JSON.parse(data.textContent), `${k}.`);
});
