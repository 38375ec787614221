// planning/simulate.py once more, for the page of a run: when each action of a schedule runs.
//
// A schedule is a list per rank of [kind, stage, micro-batch]. A rank starts its next action as soon
// as its previous one has ended and the results it depends on have arrived from other ranks.
// tests/planning/test_simulate_js.py compares this file with Python. Seconds may be any unit.
"use strict";

// What must have ended before an action can start: pipeline/schedules/schedule.py, dependencies().
function dependencies([kind, stage, microbatch], stages) {
  if (kind === "F") return stage > 0 ? [`F${stage - 1},${microbatch}`] : [];
  if (kind === "W") return [`I${stage},${microbatch}`];
  const own = `F${stage},${microbatch}`;
  return stage + 1 < stages ? [own, `I${stage + 1},${microbatch}`] : [own];
}

// All actions with their rank and what they need, each after its dependencies and after those before
// it on its rank. Throws an Error if the schedule deadlocks.
function inOrder(schedule) {
  const rows = schedule.map((row, rank) => row.map((action) => ({ action, rank, needs: [] })));
  const stages = 1 + Math.max(...schedule.flat().map(([, stage]) => stage));
  const done = new Map(); // by name; a whole backward is both halves
  const at = rows.map(() => 0);
  const order = [];
  const total = schedule.flat().length;
  while (order.length < total) {
    const before = order.length;
    rows.forEach((row, rank) => {
      for (; at[rank] < row.length; at[rank]++) {
        const next = row[at[rank]];
        const names = dependencies(next.action, stages);
        if (!names.every((name) => done.has(name))) break;
        next.needs = names.map((name) => done.get(name));
        const [kind, stage, microbatch] = next.action;
        for (const name of kind === "B" ? "BIW" : kind) done.set(`${name}${stage},${microbatch}`, next);
        order.push(next);
      }
    });
    if (order.length === before) throw new Error("deadlock");
  }
  return order;
}

// When everything happens, from 0. `work` has functions: seconds(kind, stage); transfer(kind, stage),
// of the result that is sent; recompute(stage); exchange(stage); update(rank); and two flags: overlap
// (a message does not hold up its sender), overlapExchange (with the last backward of its stage).
// Returns rows, per rank {action, start, end, idle} in order; exchanged and updated, per rank; and
// seconds, span, bubble of the step.
function simulate(schedule, work) {
  const order = inOrder(schedule);
  for (const each of order) {
    for (const needed of each.needs) needed.remote ||= needed.rank !== each.rank;
  }
  const free = schedule.map(() => 0);
  const rows = schedule.map(() => []);
  let busy = 0;
  for (const each of order) {
    const [kind, stage] = each.action;
    const again = kind === "B" || kind === "I" ? work.recompute(stage) : 0;
    const ready = free[each.rank] + again;
    const others = each.needs.filter((needed) => needed.rank !== each.rank);
    each.start = Math.max(ready, ...others.map((needed) => needed.arrives));
    each.idle = each.start - ready;
    each.end = each.arrives = free[each.rank] = each.start + work.seconds(kind, stage);
    busy += each.end - each.start + again;
    if (each.remote) {
      each.arrives += work.transfer(kind, stage);
      if (!work.overlap) free[each.rank] = each.arrives;
    }
    rows[each.rank].push(each);
  }
  const exchanged = rows.map((row) => exchangedBy(row, work));
  const updated = exchanged.map((end, rank) => end + work.update(rank));
  const span = Math.max(...rows.map((row) => row[row.length - 1].end));
  const bubble = 1 - busy / (rows.length * span);
  return { rows, exchanged, updated, span, bubble, seconds: Math.max(...updated) };
}

// When a rank has the gradients of all its replicas. It exchanges one stage at a time.
function exchangedBy(row, work) {
  const last = new Map();
  for (const each of row) if (each.action[0] !== "F") last.set(each.action[1], each);
  const rowEnd = row[row.length - 1].end;
  let until = 0;
  for (const each of [...last.values()].sort((a, b) => a.end - b.end)) {
    const begin = work.overlapExchange ? each.start : rowEnd;
    until = Math.max(each.end, Math.max(until, begin) + work.exchange(each.action[1]));
  }
  return Math.max(until, rowEnd);
}

if (typeof module !== "undefined") module.exports = { simulate };
