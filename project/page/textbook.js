// What the page of `report.py --explore` has besides the simulator: the catalogue's lists, which
// project/figures/pages.py wrote as text; the textbook's formulas; puzzles.
// tests/project/test_explore.py compares lists and formulas with Python.
"use strict";

const KINDS = "FBIW";
// The lists of a schedule from their text: a word per rank, a character per action. Forwards of a stage
// come in the order of the micro-batches, and so do backwards, whole or halved.
function decode(text, vShaped) {
  const words = text.split(" ");
  return words.map((word, rank) => {
    const next = {}; // by stage and kind: the micro-batch that is next
    const halved = {}; // by stage: micro-batches that have had their I
    return [...word].map((letter) => {
      const at = letter.charCodeAt(0) - 65; // four letters from A for a rank's first stage, four for its second, ...
      const [kind, chunk] = [KINDS[at % 4], Math.floor(at / 4)];
      const stage = vShaped && chunk ? 2 * words.length - 1 - rank : chunk * words.length + rank;
      if (kind === "W") return [kind, stage, halved[stage].shift()];
      const key = (kind === "F" ? "F" : "B") + stage;
      const microbatch = next[key] ?? 0;
      next[key] = microbatch + 1;
      if (kind === "I") (halved[stage] = halved[stage] ?? []).push(microbatch);
      return [kind, stage, microbatch];
    });
  });
}

// The same lists with every whole backward in its two halves.
function inHalves(lists) {
  return lists.map((row) => row.flatMap(([kind, ...place]) =>
    kind === "B" ? [["I", ...place], ["W", ...place]] : [[kind, ...place]]));
}

// What the textbook says of n ranks, m micro-batches and v chunks: the idle share of a step and the
// micro-batches held at most, each with its formula; `when` it holds. Null: no formula.
function textbook(schedule, n, m, v, { F, I, W }) {
  const whole = [(n - 1) / (m + n - 1), "(n-1)/(m+n-1)"];
  const equal = "ranks are alike and messages take no time";
  const alike = F === I && I === W;
  const early = (n - 1) * (F + I - W);
  const row = (idle, held, when, holds) => ({ idle, held, when, holds });
  switch (schedule) {
    case "gpipe": return row(whole, [m, "m"], equal, true);
    case "1f1b": return row(whole, [Math.min(m, n), "min(n, m)"], equal, true);
    case "sequential": return row([(n - 1) / n, "(n-1)/n"], [1, "1"], equal, true);
    case "zb": return row([early / (m * (F + I + W) + early), alike ? "(n-1)/(3m+n-1)" : "(n-1)(F+I-W) of m(F+I+W) + (n-1)(F+I-W)"],
      [Math.min(m, n), "min(n, m)"], `m is at least n, W takes no longer than F or I, ${equal}`, m >= n && W <= Math.min(F, I));
    case "interleaved": return row([(n - 1) / (v * m + n - 1), "(n-1)/(vm+n-1)"],
      [n + (n - 1) / v, "n + (n-1)/v"], `n divides m, m is more than n, ${equal}`, m % n === 0 && m > n);
    case "zbv": return row([(n - 1) / (6 * m + n - 1), "(n-1)/(6m+n-1)"],
      [n, "n"], `F, I and W take equally long, m is at least 2n, ${equal}`, alike && m >= 2 * n);
    case "vhalf": return row(null, [Math.ceil((n + 1) / 2), "(n+1)/2, rounded up"], `m is at least n`, m >= n);
    case "vmin": return row(null, [Math.ceil((n + 2) / 3), "(n+2)/3, rounded up"], `m is at least n`, m >= n);
    default: return row(null, null, "", true);
  }
}

// Puzzles: settings, and when they are solved. `held` and `seconds` are limits; `breaks` is how the
// validator's sentence must begin; `alone`: at first, micro-batches run one by one.
const PUZZLES = [
  {
    name: "Break it", schedule: "1f1b", ranks: 2, m: 2, breaks: "deadlock",
    text: "A list may be in an order that no machine can run. Move actions until ranks wait for each other for ever.",
    hint: "A backward needs the forward of its own stage, and the backward of the stage after it.",
  },
  {
    name: "Hold less than GPipe", schedule: "gpipe", ranks: 3, m: 4, held: 3, seconds: 18,
    text: "Three ranks, four micro-batches. GPipe holds all four until the first backward. Hold three at most, in the same time.",
    hint: "A backward releases a micro-batch. On rank 2 it can follow its forward at once, on rank 1 after one more forward, on rank 0 after two.",
  },
  {
    name: "Beat 1F1B", schedule: "1f1b", ranks: 4, m: 8, split: true, held: 4, seconds: 27,
    text: "Four ranks, eight micro-batches, four held at most. 1F1B takes 33. Here each backward is cut into its halves, I and W, which brings it to 30. Reach 27.",
    hint: "No rank waits for a W. Rank 3 holds one micro-batch only: it may keep three W for the end, rank 2 two, rank 1 one.",
  },
  {
    name: "Hide the messages", schedule: "1f1b", ranks: 2, m: 4, message: 1, held: 3, seconds: 17,
    text: "Two ranks, four micro-batches, and a message takes as long as a forward: 1F1B takes 19. Hold three at most. Reach 17.",
    hint: "While a gradient is on its way to rank 0, this rank could run one more forward.",
  },
  {
    name: "Interleave", schedule: "interleaved", ranks: 2, m: 2, chunks: 2, F: 2, I: 2, W: 2, alone: true, seconds: 15,
    text: "Two ranks with two chunks each, a and b: a micro-batch passes through both ranks twice. At first they run one micro-batch after the other, which takes 24. Reach 15.",
    hint: "While one micro-batch is elsewhere, a rank can work on the other: F0a F1a F0b F1b.",
  },
];
const FREE = { schedule: "1f1b", ranks: 4, m: 8, chunks: 2, F: 1, I: 1, W: 1, message: 0, last: 1, split: false, start: "", lists: "" };

// The rank of each stage: one each, in a V, or round-robin.
function placed(ranks, chunks, isV) {
  return Array.from({ length: ranks * chunks }, (_, s) => (isV && s >= ranks ? 2 * ranks - 1 - s : s % ranks));
}

// F0; with several stages on a rank F0a, F0b, as in Python's tables.
function titled([kind, stage, microbatch], ranks) {
  const own = ranks.flatMap((rank, s) => (rank === ranks[stage] ? [s] : []));
  return `${kind}${microbatch}${own.length > 1 ? String.fromCharCode(97 + own.indexOf(stage)) : ""}`;
}

// The text of a file, as pipeline/schedules/written.py writes it.
function write(lists, ranks, name) {
  const where = ranks.length > lists.length ? `stages on ranks: ${ranks.join(" ")}\n` : "";
  return `# ${name}\n${where}${lists.map((row, r) => `rank ${r}: ${row.map((action) => titled(action, ranks)).join(" ")}\n`).join("")}`;
}

// Reads such a text: {lists, ranks, m}, or {wrong}: a sentence. validate() says whether the lists can run.
function read(text) {
  let ranks = null;
  const rows = [];
  for (const [k, whole] of text.split("\n").entries()) {
    const line = whole.split("#")[0];
    const stages = line.match(/^\s*stages\s+on\s+ranks\s*:((?:\s+\d+)+)\s*$/);
    if (stages) ranks = stages[1].trim().split(/\s+/).map(Number);
    const label = line.match(/^\s*(?:rank|stage)\s+(\d+)\s*:/);
    if (label && Number(label[1]) !== rows.length) return { wrong: `line ${k + 1}: rank ${rows.length} comes next, not rank ${label[1]}` };
    const words = stages ? [] : line.slice(label?.[0].length ?? 0).split(/[\s.]+/).filter(Boolean);
    if (label || words.length) rows.push([k + 1, words]);
  }
  const chunks = 1 + Math.max(0, ...rows.flatMap(([, words]) => words.map((word) => Math.max(0, word.charCodeAt(word.length - 1) - 97))));
  ranks = ranks ?? placed(rows.length, chunks, false);
  const lists = [];
  for (const [r, [line, words]] of rows.entries()) {
    const own = ranks.flatMap((rank, s) => (rank === r ? [s] : []));
    lists.push([]);
    for (const word of words) {
      const found = word.match(/^([FBIW])(\d+)([a-z]?)$/);
      const stage = found && own[found[3] ? found[3].charCodeAt(0) - 97 : 0];
      if (!Number.isInteger(stage)) return { wrong: `line ${line}: ${word} is no action of rank ${r}` };
      lists[r].push([found[1], stage, Number(found[2])]);
    }
  }
  return { lists, ranks, m: 1 + Math.max(-1, ...lists.flat().map(([, , i]) => i)) };
}

// The most that ranks hold, in micro-batches of a whole rank.
function mostHeld(lists, chunks) {
  return lists.map((row) => Math.max(0, ...heldAfter(row)) / chunks);
}

if (typeof module !== "undefined") module.exports = { decode, inHalves, textbook, PUZZLES, FREE, placed, titled, write, read };
