// planning/simulate.py and pipeline/schedules/schedule.py in JavaScript, for pages: when each action of
// a schedule runs, what each gap is due to, and whether the lists can run at all.
//
// A schedule is a list per rank of [kind, stage, micro-batch]. A rank starts its next action as soon
// as its previous one has ended and the results it depends on have arrived from other ranks.
// tests/planning/test_simulate_js.py compares this file with Python. Seconds may be any unit.
"use strict";

const HELD_MORE = { F: 1, B: -1, I: 0, W: -1 }; // by how many more micro-batches a stage then holds

// The name of an action in a Map, and as a person reads it.
const keyOf = ([kind, stage, microbatch]) => `${kind}${stage},${microbatch}`;
const nameOf = ([kind, stage, microbatch]) => `${kind}${microbatch} on stage ${stage}`;

// What must have ended before an action can start.
function dependencies([kind, stage, microbatch], stages) {
  if (kind === "F") return stage > 0 ? [`F${stage - 1},${microbatch}`] : [];
  if (kind === "W") return [`I${stage},${microbatch}`];
  const own = `F${stage},${microbatch}`;
  return stage + 1 < stages ? [own, `I${stage + 1},${microbatch}`] : [own];
}

// When everything happens, from 0. `work` has functions seconds(kind, stage) and recompute(stage), and
// numbers: transfer of a message, which does not hold up its sender; exchange of a rank's gradients,
// after its last action; update. Returns rows: per rank, in order, {action, start, end, again, idle, waitsFor};
// updated, per rank; seconds and bubble of the step; and deadlock: empty, or the sentence of Python's
// validate() on the actions that can never start. In a deadlock the rows end before these actions.
function simulate(schedule, work) {
  const stages = 1 + Math.max(...schedule.flat().map(([, stage]) => stage));
  const ended = new Map(); // by name: {action, rank, end}; a whole backward is both halves
  const rows = schedule.map(() => []);
  const free = schedule.map(() => 0);
  let left = schedule.flat().length;
  let busy = 0;
  let deadlock = "";
  while (left > 0 && !deadlock) {
    const before = left;
    schedule.forEach((actions, rank) => {
      for (const action of actions.slice(rows[rank].length)) {
        const needed = dependencies(action, stages).map((name) => ended.get(name));
        if (needed.includes(undefined)) break;
        const [kind, stage, microbatch] = action;
        const again = "BI".includes(kind) ? work.recompute(stage) : 0;
        const ready = free[rank] + again;
        let start = ready;
        let waitsFor = null;
        for (const other of needed) {
          if (other.rank === rank || other.end + work.transfer <= start) continue;
          [start, waitsFor] = [other.end + work.transfer, other.action];
        }
        const end = start + work.seconds(kind, stage);
        for (const part of kind === "B" ? "BIW" : kind) ended.set(`${part}${stage},${microbatch}`, { action, rank, end });
        rows[rank].push({ action, start, end, again, idle: start - ready, waitsFor });
        free[rank] = end;
        busy += end - start + again;
        left--;
      }
    });
    if (left === before) {
      const stuck = schedule.flatMap((actions, rank) => actions.slice(rows[rank].length, rows[rank].length + 1));
      deadlock = `deadlock: the next actions wait for ever: ${stuck.map(nameOf).join(", ")}`;
    }
  }
  const updated = free.map((end) => end + work.exchange + work.update);
  return { rows, updated, seconds: Math.max(...updated), bubble: 1 - busy / (rows.length * Math.max(...free)), deadlock };
}

// Every idle gap of a step without exchange and update: {rank, start, end, before, waitsFor, causes}.
// Idle time that is left with equal stages and no messages is `fill`, the schedule's own; what uneven
// stages add is `imbalance`; what messages add is `transfer`.
function gapsOf(schedule, work) {
  const step = simulate(schedule, work);
  const level = simulate(schedule, { ...work, transfer: 0 });
  const sums = {}; // by kind: [seconds, actions]
  for (const [kind, stage] of schedule.flat()) {
    sums[kind] = sums[kind] ?? [0, 0];
    sums[kind][0] += work.seconds(kind, stage);
    sums[kind][1]++;
  }
  const stages = [...new Set(schedule.flat().map(([, stage]) => stage))];
  const again = stages.reduce((sum, stage) => sum + work.recompute(stage), 0) / stages.length;
  const mean = (kind) => sums[kind][0] / sums[kind][1];
  const equal = simulate(schedule, { ...work, transfer: 0, seconds: mean, recompute: () => again });
  const split = (idle, uneven, even) => {
    const fill = Math.min(idle, even);
    const imbalance = Math.min(idle - fill, Math.max(uneven - even, 0));
    const parts = { fill, imbalance, transfer: idle - fill - imbalance };
    return Object.fromEntries(Object.entries(parts).filter(([, part]) => part > 0));
  };
  const tiny = 1e-9 * step.seconds;
  const last = ({ seconds, updated }, rank) => seconds - updated[rank];
  return step.rows.flatMap((row, rank) => {
    const gaps = row.map(({ action, start, idle, waitsFor }, k) => ({
      rank, start: start - idle, end: start, before: action, waitsFor,
      causes: split(idle, level.rows[rank][k].idle, equal.rows[rank][k].idle),
    }));
    const causes = split(last(step, rank), last(level, rank), last(equal, rank));
    gaps.push({ rank, start: step.updated[rank], end: step.seconds, before: null, waitsFor: null, causes });
    return gaps.filter(({ start, end }) => end - start > tiny);
  });
}

// Per action of a rank, the micro-batches that the rank then holds; each of its stages counts its own.
function heldAfter(actions) {
  let held = 0;
  return actions.map(([kind]) => (held += HELD_MORE[kind]));
}

// What is wrong with the lists, in the words of Python's validate(); empty if nothing is.
function validate(schedule, microbatches) {
  const flat = schedule.flat();
  const places = [...new Set(schedule.flatMap((actions, rank) => actions.map(([, stage]) => `${stage}, ${rank}`)))]
    .map((place) => place.split(", ").map(Number))
    .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (let stage = 0; stage < new Set(places.map(([each]) => each)).size; stage++) {
    const on = places.filter(([each]) => each === stage).map(([, rank]) => rank);
    const where = on.length ? `on ranks ${on.join(" and ")}` : "on no rank";
    if (on.length !== 1) return `stage ${stage} is ${where}; each stage, counted from 0, has one rank`;
  }
  const counts = new Map();
  for (const action of flat) counts.set(keyOf(action), (counts.get(keyOf(action)) ?? 0) + 1);
  const halved = ([, stage, i]) => counts.has(`I${stage},${i}`) || counts.has(`W${stage},${i}`);
  const expected = places.flatMap(([stage]) => Array.from({ length: microbatches }, (_, i) =>
    [["F", stage, i], ...(halved(["", stage, i]) ? ["I", "W"] : ["B"]).map((kind) => [kind, stage, i])]).flat());
  const wanted = new Set(expected.map(keyOf));
  const inOrder = [...expected, ...flat].sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : a[1] - b[1] || a[2] - b[2]));
  for (const action of inOrder) {
    const [there, times] = [counts.get(keyOf(action)) ?? 0, Number(wanted.has(keyOf(action)))];
    if (there !== times) return `stage ${action[1]}: ${action[0]}${action[2]} is there ${there} times, not ${times}`;
  }
  return simulate(schedule, { seconds: () => 1, recompute: () => 0, transfer: 0, exchange: 0, update: 0 }).deadlock;
}

if (typeof module !== "undefined") module.exports = { simulate, gapsOf, heldAfter, validate };
