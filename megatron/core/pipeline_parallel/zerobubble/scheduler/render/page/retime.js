"use strict";
// When every instruction of a plan runs, under costs that the page's sliders change.
//
// The rule is that of scheduler/simulate.py: a rank runs its program strictly in order, each
// instruction as soon as the one before has ended and its inputs have arrived, `transfer` after
// their makers ended on another rank. Inputs made on the same rank come earlier in its program and
// never have to be waited for, so `plan.inputs` lists only those of other ranks. A test holds this
// file's results against simulate.py's.
//
// plan.programs[rank]      the instructions in order, [{text, op, stage, microbatch}]
// plan.inputs[rank][step]  where inputs are made: [rank, step, rank, step, ...]
// costs                    {F, B, W: per stage, transfer}

/** "0F0 0F1 ..." as instructions. */
function parseProgram(text) {
  return text.split(" ").filter(Boolean).map((word) => {
    const [, stage, op, microbatch] = /^(\d+)([A-Z]+)(\d+)$/.exec(word);
    return { text: word, op, stage: Number(stage), microbatch: Number(microbatch) };
  });
}

/** AR and PV fix a moment and take no time. */
function isMark(op) {
  return op === "AR" || op === "PV";
}

function durationOf({ op, stage }, costs) {
  if (isMark(op)) return 0;
  if (op === "BW") return costs.B[stage] + costs.W[stage];
  return costs[op][stage];
}

/** When the last input of a step arrives, and where it was made; null if one is not made yet. */
function arrivalOf(plan, ends, transfer, rank, step) {
  const inputs = plan.inputs[rank][step];
  const latest = { time: 0, rank: -1, step: -1 };
  for (let k = 0; k < inputs.length; k += 2) {
    const end = ends[inputs[k]][inputs[k + 1]];
    if (end === undefined) return null;
    if (end + transfer > latest.time) {
      Object.assign(latest, { time: end + transfer, rank: inputs[k], step: inputs[k + 1] });
    }
  }
  return latest;
}

/** Start and end of every instruction, and the figures that follow from them. */
function retime(plan, costs) {
  const starts = plan.programs.map(() => []);
  const ends = plan.programs.map(() => []);
  let moved = true;
  while (moved) {
    moved = false;
    plan.programs.forEach((program, rank) => {
      for (let step = starts[rank].length; step < program.length; step++) {
        const arrival = arrivalOf(plan, ends, costs.transfer, rank, step);
        if (arrival === null) break;
        const start = Math.max(step ? ends[rank][step - 1] : 0, arrival.time);
        starts[rank].push(start);
        ends[rank].push(start + durationOf(program[step], costs));
        moved = true;
      }
    });
  }
  return { starts, ends, transfer: costs.transfer, ...figuresOf(plan.programs, starts, ends) };
}

/** Makespan, longest span, both bubble rates, work of the busiest rank. */
function figuresOf(programs, starts, ends) {
  const used = ends.map((row, rank) => rank).filter((rank) => ends[rank].length);
  const begins = programs.map((program, rank) =>
    starts[rank][Math.max(0, program.findIndex(({ op }) => !isMark(op)))]);
  const first = Math.min(...used.map((rank) => starts[rank][0]));
  const makespan = Math.max(...used.map((rank) => ends[rank].at(-1))) - first;
  const longestSpan = Math.max(...used.map((rank) => ends[rank].at(-1) - begins[rank]));
  const busy = used.map((rank) =>
    ends[rank].reduce((sum, end, step) => sum + end - starts[rank][step], 0));
  const work = Math.max(...busy);
  const rate = (cost) => (cost > 0 ? (cost - work) / cost : 0);
  return {
    makespan, longestSpan, work,
    bubbleRateMakespan: rate(makespan), bubbleRateSpan: rate(longestSpan),
  };
}

/** What a rank does at a time: {step} of an instruction, or a gap {start, end, cause, step}. */
function activityAt(plan, timing, rank, time) {
  const { starts, ends, makespan } = timing;
  const after = starts[rank].findIndex((start) => start > time);
  const next = after < 0 ? starts[rank].length : after;
  if (next && ends[rank][next - 1] > time) return { step: next - 1 };
  const start = next ? ends[rank][next - 1] : 0;
  if (next === starts[rank].length) return { start, end: makespan, cause: null, step: null };
  const cause = arrivalOf(plan, ends, timing.transfer, rank, next);
  return { start, end: starts[rank][next], cause, step: next };
}

/** Costs with new totals per rank; `totals` and `base` are {F, B, W, transfer}. */
function rescaled(costs, base, totals, numRanks) {
  const scaled = { transfer: totals.transfer };
  for (const op of ["F", "B", "W"]) {
    const equal = totals[op] * numRanks / costs[op].length; // where there is nothing to scale
    scaled[op] = costs[op].map((cost) => (base[op] > 0 ? cost * totals[op] / base[op] : equal));
  }
  return scaled;
}

if (typeof module !== "undefined") module.exports = { parseProgram, retime, rescaled, activityAt };
