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

// When everything happens, from 0. `work` has functions seconds(kind, stage) and recompute(stage), and
// numbers: transfer of a message, which does not hold up its sender; exchange of a rank's gradients,
// after its last action; update. Returns rows, per rank {action, start, end} in order; updated, per
// rank; seconds and bubble of the step. Throws an Error if the schedule deadlocks.
function simulate(schedule, work) {
  const stages = 1 + Math.max(...schedule.flat().map(([, stage]) => stage));
  const ended = new Map(); // by name: {rank, end}; a whole backward is both halves
  const rows = schedule.map(() => []);
  const free = schedule.map(() => 0);
  let left = schedule.flat().length;
  let busy = 0;
  while (left > 0) {
    const before = left;
    schedule.forEach((actions, rank) => {
      for (const action of actions.slice(rows[rank].length)) {
        const needed = dependencies(action, stages).map((name) => ended.get(name));
        if (needed.includes(undefined)) break;
        const [kind, stage, microbatch] = action;
        const again = "BI".includes(kind) ? work.recompute(stage) : 0;
        const others = needed.filter((other) => other.rank !== rank);
        const start = Math.max(free[rank] + again, ...others.map(({ end }) => end + work.transfer));
        const end = start + work.seconds(kind, stage);
        for (const part of kind === "B" ? "BIW" : kind) ended.set(`${part}${stage},${microbatch}`, { rank, end });
        rows[rank].push({ action, start, end });
        free[rank] = end;
        busy += end - start + again;
        left--;
      }
    });
    if (left === before) throw new Error("deadlock");
  }
  const updated = free.map((end) => end + work.exchange + work.update);
  return { rows, updated, seconds: Math.max(...updated), bubble: 1 - busy / (rows.length * Math.max(...free)) };
}

if (typeof module !== "undefined") module.exports = { simulate };
