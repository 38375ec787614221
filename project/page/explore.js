// A step to take apart: choose a schedule and see its step; move an action to another place in its
// list and read what that breaks or costs. The page starts with a schedule, with a puzzle or, in a
// report, with the step of a run. simulate.js times and validates the lists, textbook.js has formulas
// and puzzles. Settings and start are in the page's URL.
"use strict";

const CAUSES = { fill: "the order of the lists", imbalance: "a slower rank", transfer: "messages on their way" };
const { microbatches, v_shaped: vShaped, lists: catalogue, runs } = JSON.parse(document.querySelector("#catalogue").textContent);
const form = document.querySelector("form");
const [lanes, said, result] = ["#lanes", "#said", "#result"].map((name) => document.querySelector(name));

const STARTS = runs.length ? runs : PUZZLES;
const UNIT = runs.length ? " ms" : "";
let settings = { ...FREE };
let lists = []; // what is shown: per rank its actions
let undone = []; // earlier lists, the newest last
let redone = []; // lists that were undone
let selected = null; // [rank, number] of an action
let current = null; // the step of these lists
let before = null; // the step before the last change
let carried = ""; // the action that was moved last: moving it further is the same change

const number = (value) => String(Number(value.toFixed(2)));
const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const chunksOf = ({ schedule, chunks }) => (schedule === "interleaved" ? Number(chunks) : Number(Object.keys(catalogue[schedule])[0]));
const inTime = (value) => number(value) + UNIT;
const startNamed = (wanted) => STARTS.find(({ name }) => name === wanted) ?? runs[0];
const usual = (wanted) => ({ ...FREE, ...startNamed(wanted), start: startNamed(wanted)?.name ?? "" });
const puzzle = () => startNamed(settings.start);
const ranksOf = (chosen) => placed(chosen.ranks, chunksOf(chosen), vShaped.includes(chosen.schedule));
const titleOf = (action) => titled(action, ranksOf(settings));
// The validator's sentence; where a rank has several stages, with the names that the lanes use.
const onLanes = (sentence) => chunksOf(settings) === 1 ? sentence
  : sentence.replace(/stage (\d+): ([FBIW])(\d+)/g, (_, s, kind, i) => `rank ${ranksOf(settings)[s]}: ${titleOf([kind, Number(s), i])}`)
    .replace(/([FBIW])(\d+) on stage (\d+)/g, (_, kind, i, s) => `${titleOf([kind, Number(s), i])} on rank ${ranksOf(settings)[s]}`)
    .replace(/^stage (\d+) is/, (_, s) => `the stage of ${titleOf(["F", Number(s), 0])} is`);

// The lists as the settings say, before anything is moved.
function startOf(chosen) {
  const { schedule, ranks, m } = chosen;
  let start = decode(catalogue[schedule][chunksOf(chosen)][ranks][m], vShaped.includes(schedule));
  if (chosen.split) start = inHalves(start);
  if (chosen.alone) start = start.map((row) => [...row].sort((a, b) => a[2] - b[2]));
  return start;
}

// Whether the lists differ from those at the beginning: the catalogue's, or a puzzle's.
const isChanged = (beginning) => JSON.stringify(lists) !== JSON.stringify(startOf(beginning));

// The work that simulate() takes. The settings are times of a rank, which its chunks share. With a run
// they are factors of its measured times, which change with the number of micro-batches of a batch.
function workOf(chosen) {
  const { ranks, last, message } = chosen;
  const run = runs.find(({ name }) => name === chosen.start);
  const chunks = chunksOf(chosen);
  const places = ranksOf(chosen);
  const rankOf = (stage) => places[stage];
  const part = (kind, rank) => (run ? run.times[kind][rank] * run.m / chosen.m : 1) / chunks * (rank === ranks - 1 ? last : 1);
  const seconds = (kind, stage) => kind === "B" ? seconds("I", stage) + seconds("W", stage) : chosen[kind] * part(kind, rankOf(stage));
  const recompute = (stage) => (run ? part("R", rankOf(stage)) : 0);
  return { seconds, recompute, transfer: message * (run?.messages ?? 1), exchange: 0, update: 0 };
}

// The validator takes the stages from the lists. This names, in its words, a stage that is wholly gone.
function missing(chosen, shown) {
  const left = new Set(shown.flat().map(([, stage]) => stage));
  const first = startOf(chosen).flat().find(([, stage]) => !left.has(stage));
  return first ? `stage ${first[1]}: ${first[0]}${first[2]} is there 0 times, not 1` : "";
}

// Everything that is shown of some lists. `broken` is the validator's sentence, or empty.
function stepOf(chosen, shown) {
  const work = workOf(chosen);
  const step = simulate(shown, work);
  const broken = validate(shown, chosen.m) || missing(chosen, shown);
  const held = mostHeld(shown, chunksOf(chosen));
  return { ...step, work, broken, held, gaps: broken ? [] : gapsOf(shown, work) };
}

// Draws the lanes: per rank its actions and gaps over time, and below them what it holds. Actions that
// can never start follow, as ghosts.
function draw(step) {
  const chunks = chunksOf(settings);
  const rows = lists.map((actions, rank) => {
    let time = step.rows[rank].length ? step.rows[rank].at(-1).end : 0;
    return actions.map((action, k) => {
      const timed = step.rows[rank][k] ?? { action, start: time, end: time + step.work.seconds(action[0], action[1]) };
      time = timed.end;
      return { ...timed, never: k >= step.rows[rank].length };
    });
  });
  const total = Math.max(...rows.flat().map(({ end }) => end), 0) || 1; // also if all actions are gone
  const shortest = Math.max(Math.min(...rows.flat().map(({ start, end }) => end - start)), runs.length ? total / 100 : 0);
  const first = lists.findIndex((row) => row.length); // the Tab key stops at its first action
  const most = Math.max(1, ...step.held, puzzle()?.held ?? 0);
  const place = ({ start, end }) => `left:${100 * start / total}%;width:${100 * (end - start) / total}%`;
  const gapAt = (gap) => {
    const parts = Object.entries(gap.causes).map(([cause, part]) => `<i class="${cause}" style="flex:${part / (gap.end - gap.start)}"></i>`);
    return `<button type="button" class="gap" tabindex="-1" style="${place(gap)}" title="${inWords(gap)}" aria-label="${inWords(gap)}">${parts.join("")}</button>`;
  };
  const letters = Math.max(1, ...lists.flat().map((action) => titleOf(action).length));
  lanes.style.minWidth = `${5.5 + total / shortest * (0.6 + 0.4 * letters)}rem`; // every label can be read
  lanes.innerHTML = rows.map((row, rank) => {
    const busy = row.reduce((sum, { start, end, again, never }) => sum + (never ? 0 : end - start + again), 0);
    const actions = row.map((timed, k) => {
      const { action, never } = timed;
      const when = never ? "it never starts" : `from ${number(timed.start)} to ${number(timed.end)}`;
      const name = `${titleOf(action)}, stage ${action[1]}, rank ${rank}, ${when}`;
      const chosen = selected && selected[0] === rank && selected[1] === k;
      return `<button type="button" class="${action[0]}${never ? " never" : ""}" data-k="${k}" aria-label="${name}" title="${name}"
        aria-pressed="${chosen}" tabindex="${chosen || (!selected && rank === first && !k) ? 0 : -1}" style="${place(timed)}">${titleOf(action)}</button>`;
    });
    const again = row.filter((timed) => timed.again).map((timed) => {
      const end = timed.start - timed.idle;
      return `<i class="R" style="${place({ start: end - timed.again, end })}"></i>`;
    });
    const gaps = step.gaps.filter((gap) => gap.rank === rank).map(gapAt);
    const idle = step.broken ? "" : `<small>${Math.round(100 * (1 - busy / total))} % idle</small>`;
    const holds = step.broken ? "" : `<small>holds ${number(step.held[rank])}</small>`;
    return `<div class="rank"><div class="name"><b>rank ${rank}</b>${idle}${holds}</div>
      <div><div class="lane" data-rank="${rank}">${actions.join("")}${again.join("")}${gaps.join("")}</div>${memory(row, total, most, chunks)}</div></div>`;
  }).join("") + `<div class="rank axis"><div class="name"><small>time</small></div><div class="lane">${ticks(total)}</div></div>`;
}

// What a rank holds over time, as a picture; the dashed line is the limit of a puzzle.
function memory(row, total, most, chunks) {
  const held = heldAfter(row.map(({ action }) => action));
  let path = "M0,0";
  let level = 0;
  row.forEach(({ action: [kind], start, end, never }, k) => {
    if (never) return;
    const at = kind === "F" ? start : end; // held from the start of F to the end of B, or W
    path += `H${at}V${held[k] / chunks}`;
    level = held[k] / chunks;
  });
  const limit = puzzle()?.held ? `<path class="limit" d="M0,${puzzle().held}H${total}"/>` : "";
  const until = row.findLast(({ never }) => !never)?.end ?? 0;
  return `<svg class="held" viewBox="0 0 ${total} ${most * 1.05}" preserveAspectRatio="none" aria-hidden="true"><g transform="translate(0 ${most * 1.05}) scale(1 -1)"><path d="${path}H${until}V0Z"/>${limit}</g></svg>`;
}

function ticks(total) {
  const power = 10 ** Math.floor(Math.log10(total / 12)); // at most 12 marks, of 1, 2 or 5 times a power of 10
  const step = power * [1, 2, 5, 10].find((each) => total / (power * each) <= 12);
  const times = Array.from({ length: Math.floor(total / step) + 1 }, (_, k) => k * step);
  return times.filter((time) => time < 0.98 * total).map((time) => `<small style="left:${100 * time / total}%">${Number(time.toPrecision(3))}</small>`).join("") +
    `<small class="end">${number(total)}</small>`;
}

// How long a step takes, and how idle ranks are, if it can run.
const lasts = (step) => (step.deadlock ? "for ever" : step.broken ? "the lists are wrong" : inTime(step.seconds));
const idles = (step) => (step.broken ? "" : percent(step.bubble));

// A gap in a sentence.
function inWords({ rank, start, end, before: next, waitsFor, causes }) {
  const parts = Object.entries(causes).map(([cause, part]) => `${number(part)} because of ${CAUSES[cause]}`);
  const what = next ? `before ${titleOf(next)}${waitsFor ? `, which needs ${titleOf(waitsFor)} of stage ${waitsFor[1]}` : ""}` : "after its last action";
  return `rank ${rank} is idle from ${number(start)} to ${number(end)}, ${what}: ${parts.join(", ")}`;
}

// What the last change has broken, or cost.
function effect(step) {
  if (step.broken) return `This cannot run. <q id="broken">${onLanes(step.broken)}</q>`;
  if (!before) return "Drag an action to another place in its list, or choose one and use the buttons below.";
  if (before.broken) return `It runs again: a step takes ${inTime(step.seconds)}.`;
  const longer = step.seconds - before.seconds;
  const time = Math.abs(longer) < 1e-9 ? `The step takes ${inTime(step.seconds)}, as before`
    : `The step takes ${inTime(step.seconds)}, ${inTime(Math.abs(longer))} ${longer > 0 ? "longer" : "less"}`;
  const held = step.held.flatMap((most, rank) => (most === before.held[rank] ? [] : [`rank ${rank} now holds at most ${number(most)}, not ${number(before.held[rank])}`]));
  return `${[time, ...held].join("; ")}.`;
}

// The step beside the textbook: rows of a table, and when the formulas hold. Not for runs.
function beside(step) {
  if (runs.length) return;
  const { schedule, ranks, m } = settings;
  const { idle, held, when, holds } = textbook(schedule, ranks, m, chunksOf(settings), settings);
  const cells = (name, value, formula, shown) => `<tr><th scope="row">${name}</th><td><b>${value}</b></td>
    <td>${formula ? `${formula[1]} = ${shown(formula[0])}` : "no formula"}</td></tr>`;
  const { F, I, W } = settings;
  const whole = idle && [m * (F + I + W) / (1 - idle[0]), "m(F+I+W) / (1 - idle)"];
  const rows = [cells("a step takes", lasts(step), whole, number),
    cells("idle, of all ranks' time", idles(step), idle, percent),
    cells("micro-batches held, at most", number(Math.max(...step.held)), held, number)];
  const alike = holds && settings.message === 0 && settings.last === 1;
  const changed = isChanged({ ...settings, alone: false, split: false });
  document.querySelector("#textbook tbody").innerHTML = rows.join("");
  document.querySelector("#when").textContent = !when ? "" : `The formulas are those of ${schedule}, and hold if ${when}. ` +
    (changed ? "Here the lists are different." : alike ? "Here that is so." : "Here that is not so.");
}

// Every schedule of the catalogue with the same ranks, micro-batches and times.
function compare() {
  const rows = Object.keys(catalogue).map((schedule) => {
    const chosen = { ...settings, schedule, split: false, alone: false, lists: "", start: runs.length ? settings.start : "" };
    const shown = startOf(chosen);
    const step = simulate(shown, workOf(chosen));
    const held = Math.max(...mostHeld(shown, chunksOf(chosen)));
    const own = schedule === settings.schedule ? ' class="own"' : "";
    return `<tr${own}><td><a href="#${urlOf(chosen)}">${schedule}</a></td><td>${inTime(step.seconds)}</td><td>${percent(step.bubble)}</td><td>${number(held)}</td></tr>`;
  });
  document.querySelector("#all tbody").innerHTML = rows.join("");
}

// The text on a run; or that of a puzzle, its goals, and whether they are reached.
function judge(step) {
  const goal = puzzle();
  document.querySelector("#puzzle").hidden = !goal;
  if (!goal) return;
  document.querySelector("#task").textContent = goal.text;
  if (runs.length) return;
  const most = Math.max(...step.held);
  const goals = goal.breaks ? [[`the lists end in a ${goal.breaks}`, step.broken.startsWith(goal.breaks)]] : [
    ["the lists can run", !step.broken],
    [`a step takes at most ${goal.seconds} (now ${lasts(step)})`, !step.broken && step.seconds <= goal.seconds + 1e-9],
    ...(goal.held ? [[`a rank holds at most ${goal.held} (now ${number(most)})`, most <= goal.held]] : []),
  ];
  const solved = goals.every(([, reached]) => reached);
  document.querySelector("#hint").textContent = goal.hint;
  document.querySelector("#goals").innerHTML = goals.map(([text, reached]) => `<li class="${reached ? "yes" : "no"}">${reached ? "✓" : "○"} ${text}</li>`).join("");
  const next = PUZZLES[PUZZLES.indexOf(goal) + 1];
  const more = next ? ` Next: <a href="#${urlOf(usual(next.name))}">${next.name}</a>` : "";
  document.querySelector("#solved").innerHTML = solved ? `Solved, with ${plural(undone.length, "change")}.${more}` : "";
}

function show(note = "") {
  const step = stepOf(settings, lists);
  const { schedule, ranks, m } = settings;
  const name = `${schedule}${isChanged(settings) ? ", changed by you" : ""}, ${plural(ranks, "rank")}, ${plural(m, "micro-batch").replace("batchs", "batches")}`;
  result.innerHTML = step.broken ? `<b>${name}: it cannot run.</b>` : `<b>${name}: a step takes ${inTime(step.seconds)}, and ranks are idle ${percent(step.bubble)} of it.</b>`;
  said.innerHTML = note + effect(step);
  draw(step);
  beside(step);
  judge(step);
  document.querySelector("#gaps").innerHTML = step.gaps.map((gap) => `<li>${inWords(gap)}</li>`).join("") || "<li>there is none</li>";
  form.elements.undo.disabled = !undone.length;
  form.elements.redo.disabled = !redone.length;
  form.elements.restart.disabled = !undone.length && !settings.lists;
  // So that a reload, and a link that is sent, have the changes.
  settings.lists = isChanged(settings) ? write(lists, ranksOf(settings), "schedule") : "";
  history.replaceState(null, "", `#${urlOf(settings)}`);
  const option = settings.lists ? "my_schedule.txt" : `${schedule}${schedule === "interleaved" ? ` --chunks ${chunksOf(settings)}` : ""}`;
  document.querySelector("#command").textContent =
    `python project/train.py pipeline --model gpt2-mini --world_size ${ranks} --num_microbatches ${m} --schedule ${option}`;
  form.elements.save.disabled = Boolean(step.broken);
  for (const tool of ["earlier", "later", "remove"]) form.elements[tool].disabled = !selected;
  current = step;
}

// The start, and the settings that differ from its usual ones, as a part of the page's URL.
function urlOf(chosen) {
  const before = { ...usual(chosen.start), start: "" };
  return new URLSearchParams(Object.entries(chosen).filter(([name, value]) => name in FREE && value !== before[name]));
}

// Writes the settings into the controls and the URL, and starts anew.
function begin(chosen) {
  const start = startNamed(chosen.start);
  const fixed = start && !runs.length; // a puzzle
  settings = fixed ? { ...usual(start.name), lists: chosen.lists } : { ...chosen, alone: false, start: start?.name ?? "" };
  if (runs.length) settings.ranks = start.ranks;
  if (!Object.hasOwn(catalogue, settings.schedule)) settings.schedule = usual(settings.start).schedule;
  const hasWhole = startOf({ ...settings, split: false }).flat().some(([kind]) => kind === "B");
  settings.split = settings.split && hasWhole;
  [lists, undone, redone, selected, before, carried] = [startOf(settings), [], [], null, null, ""];
  const own = settings.lists && read(settings.lists);
  if (own?.lists?.length === settings.ranks) lists = own.lists;
  else settings.lists = "";
  for (const control of form.querySelectorAll("[name]")) {
    if (control.type === "checkbox") control.checked = settings[control.name];
    else if (control.name === "m") control.value = microbatches.indexOf(settings.m);
    else if (control.name in settings) control.value = settings[control.name];
    if (control.name !== "start" && control.name in settings) control.disabled = Boolean(fixed);
    const shown = control.parentElement.querySelector("output");
    if (shown) shown.value = settings[control.name];
  }
  form.elements.chunks.closest("label").hidden = settings.schedule !== "interleaved";
  form.elements.split.closest("label").hidden = !hasWhole;
  compare();
  show();
}

// Moves an action to a place in its own list or in another rank's; without a rank, removes it.
function move(rank, k, toRank = null, to = 0) {
  if (rank === toRank && k === to) return;
  if (carried !== keyOf(lists[rank][k])) {
    undone.push(lists.map((row) => [...row]));
    redone = [];
    before = current;
  }
  const [action] = lists[rank].splice(k, 1);
  carried = keyOf(action);
  if (toRank !== null) lists[toRank].splice(to, 0, action);
  selected = null;
  show(toRank === null ? `${titleOf(action)} of rank ${rank} is gone. ` : `${titleOf(action)} is now number ${to + 1} of ${lists[toRank].length} on rank ${toRank}. `);
  if (toRank !== null) focusOn([toRank, to]);
  else if (lists[rank].length) focusOn([rank, Math.min(k, lists[rank].length - 1)]);
}

// Undoes the last change, or redoes it.
function undo(from = undone, to = redone, note = "The last change is undone. ") {
  if (!from.length) return;
  to.push(lists);
  [lists, selected, before, carried] = [from.pop(), null, current, ""];
  show(note);
  // The focus was on an action, and actions have been drawn anew.
  if (document.activeElement === document.body) focusOn(placeOf(lanes.querySelector("[data-k]")));
}

const redo = () => undo(redone, undone, "The change is redone. ");

// Opens a file if the page has its sizes and its placement of stages; else says what is wrong.
function openFile(text) {
  const { lists: rows, ranks, m, wrong } = read(text);
  const [n, chunks] = [rows?.length, ranks?.length / rows?.length];
  const like = ["1f1b", "zbv", "interleaved"].find((schedule) => !wrong && `${ranks}` ===
    `${placed(n, schedule === "1f1b" ? 1 : schedule === "zbv" ? 2 : chunks, schedule === "zbv")}`);
  const known = like && catalogue[like][like === "interleaved" ? chunks : like === "zbv" ? 2 : 1]?.[n]?.[m];
  const why = wrong || (known ? validate(rows, m) : "the page has no schedule with these numbers of ranks, micro-batches and stages");
  if (why) said.textContent = `This file cannot be opened: ${why}`;
  else begin({ ...settings, start: runs.length ? settings.start : "", schedule: like, ranks: n, m, chunks: Math.max(2, chunks), split: false, lists: text });
}

function save() {
  const link = document.createElement("a");
  link.href = `data:text/plain,${encodeURIComponent(write(lists, ranksOf(settings), "my_schedule.txt"))}`;
  link.download = "my_schedule.txt";
  link.click();
}

const buttonOf = (rank, k) => lanes.querySelector(`.lane[data-rank="${rank}"] [data-k="${k}"]`);
function focusOn(place) {
  selected = place;
  for (const each of lanes.querySelectorAll("[aria-pressed=true]")) [each.ariaPressed, each.tabIndex] = ["false", -1];
  const button = buttonOf(...place);
  [button.ariaPressed, button.tabIndex] = ["true", 0];
  for (const tool of ["earlier", "later", "remove"]) form.elements[tool].disabled = false;
  button.focus({ preventScroll: true });
  button.scrollIntoView({ block: "nearest", inline: "nearest" });
}
const placeOf = (button) => [Number(button.parentElement.dataset.rank), Number(button.dataset.k)];
const within = (row, k) => Math.max(0, Math.min(row.length, k));

form.addEventListener("input", ({ target }) => {
  const value = target.type === "checkbox" ? target.checked : target.name === "m" ? microbatches[target.value]
    : ["schedule", "start"].includes(target.name) ? target.value : Number(target.value);
  if (target.name === "open") target.files[0]?.text().then(openFile).finally(() => (target.value = ""));
  else begin(target.name === "start" ? usual(value) : { ...settings, [target.name]: value, lists: "" });
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("click", ({ target }) => {
  if (target.name === "undo") undo();
  else if (target.name === "redo") redo();
  else if (target.name === "save") save();
  else if (target.name === "restart") begin({ ...settings, lists: startNamed(settings.start)?.lists ?? "" });
  else if (target.name === "remove") move(...selected);
  else if (target.name === "earlier" || target.name === "later") shift(selected, target.name === "later" ? 1 : -1);
});
// Moves an action by a place in its list.
function shift([rank, k], by) {
  const to = k + by;
  if (to >= 0 && to < lists[rank].length) move(rank, k, rank, to);
}

lanes.addEventListener("keydown", (event) => {
  const button = event.target.closest("[data-k]");
  if (!button) return;
  const [rank, k] = placeOf(button);
  const [down, right] = [{ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0, { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0];
  if (event.key === "Delete" || event.key === "Backspace") move(rank, k);
  else if (event.key === "Home" || event.key === "End") focusOn([rank, event.key === "Home" ? 0 : lists[rank].length - 1]);
  else if (right && event.shiftKey) shift([rank, k], right);
  else if (right && lists[rank][k + right]) focusOn([rank, k + right]);
  else if (down && event.shiftKey && lists[rank + down]) move(rank, k, rank + down, within(lists[rank + down], k));
  else if (down) {
    let other = rank + down; // the next rank that has actions
    while (lists[other] && !lists[other].length) other += down;
    if (lists[other]) focusOn([other, within(lists[other].slice(1), k)]);
  } else if (!right) return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const key = event.ctrlKey || event.metaKey ? event.key.toLowerCase() : "";
  if (key === "y" || (key === "z" && event.shiftKey)) redo();
  else if (key === "z") undo();
});

// Dragging. A finger taps an action first, and can then drag it; elsewhere a finger scrolls the page.
let drag = null; // {button, x, y, moved, target}
lanes.addEventListener("pointerdown", (event) => {
  const button = event.target.closest("[data-k]");
  const gap = event.target.closest(".gap");
  if (gap) said.textContent = `${gap.ariaLabel}.`;
  if (!button || event.button) return;
  const chosen = button.ariaPressed === "true";
  focusOn(placeOf(button));
  if (event.pointerType === "touch" && !chosen) return;
  button.setPointerCapture(event.pointerId);
  drag = { button, x: event.clientX, y: event.clientY, moved: false, target: null };
});
lanes.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const { button, x, y } = drag;
  drag.moved = drag.moved || Math.hypot(event.clientX - x, event.clientY - y) > 4;
  if (!drag.moved) return;
  button.classList.add("dragged");
  button.style.transform = `translate(${event.clientX - x}px, ${event.clientY - y}px)`;
  drag.target = placeUnder(event.clientX, event.clientY, button);
});
for (const end of ["pointerup", "pointercancel"]) {
  lanes.addEventListener(end, () => {
    if (!drag) return;
    const { button, moved, target } = drag;
    drag = null;
    button.classList.remove("dragged");
    button.style.transform = "";
    caret(null);
    if (end === "pointerup" && moved && target) move(...placeOf(button), ...target);
  });
}

// The rank and the place in its list at a point of the screen; the caret shows it.
function placeUnder(x, y, dragged) {
  const lane = [...lanes.querySelectorAll(".lane[data-rank]")].find((each) => {
    const { top, bottom } = each.parentElement.getBoundingClientRect();
    return top <= y && y <= bottom;
  });
  if (!lane) return caret(null);
  const others = [...lane.querySelectorAll("[data-k]")].filter((each) => each !== dragged);
  const middle = (each) => each.getBoundingClientRect().left + each.offsetWidth / 2;
  const place = others.filter((each) => middle(each) < x).length;
  const before = others[place - 1];
  caret(lane, others[place]?.offsetLeft ?? (before ? before.offsetLeft + before.offsetWidth : 0));
  return [Number(lane.dataset.rank), place];
}
function caret(lane, left = 0) {
  lanes.querySelector(".caret")?.remove();
  if (lane) lane.insertAdjacentHTML("beforeend", `<span class="caret" style="left:${left}px"></span>`);
  return null;
}

for (const name of Object.keys(catalogue)) form.elements.schedule.add(new Option(name));
for (const { name } of STARTS) form.elements.start.add(new Option(name));
form.elements.m.max = microbatches.length - 1;
form.elements.chunks.max = Math.max(...Object.keys(catalogue.interleaved));
const fromUrl = () => {
  const given = new URLSearchParams(location.hash.slice(1));
  const chosen = usual(given.get("start"));
  for (const [name, text] of given) {
    if (!(name in FREE)) continue;
    const value = typeof FREE[name] === "number" ? Number(text) : typeof FREE[name] === "boolean" ? text === "true" : text;
    if (value === value) chosen[name] = value;
  }
  chosen.m = microbatches.findLast((size) => size <= chosen.m) ?? microbatches[0];
  for (const range of form.querySelectorAll("[type=range]:not([name=m])")) {
    range.value = chosen[range.name]; // the browser takes the nearest value that the control can have
    chosen[range.name] = Number(range.value);
  }
  begin(chosen);
};
addEventListener("hashchange", () => {
  fromUrl();
  if (runs.length) form.scrollIntoView();
});
fromUrl();
