"use strict";
// Draws one plan on a canvas: for each rank its bars, the measured bars if there are any, and the
// memory curve under them.

const LAYOUT = {
  left: 64, right: 74, top: 26, // rank names, peak memory, time axis
  bar: 22, measured: 14, memory: 26, gap: 9,
};

/** Heights and offsets of the rows of a plan. */
function rowsOf(plan) {
  const measured = plan.measured ? LAYOUT.measured + 2 : 0;
  const pitch = LAYOUT.bar + measured + 3 + LAYOUT.memory + LAYOUT.gap;
  return {
    pitch,
    top: (rank) => LAYOUT.top + rank * pitch,
    measuredTop: (rank) => LAYOUT.top + rank * pitch + LAYOUT.bar + 2,
    memoryTop: (rank) => LAYOUT.top + rank * pitch + LAYOUT.bar + measured + 3,
    height: LAYOUT.top + plan.programs.length * pitch,
  };
}

/** Pixels <-> times for a view {from, to} on a canvas of a width. */
function scaleOf(view, width) {
  const inner = Math.max(1, width - LAYOUT.left - LAYOUT.right);
  const perTime = inner / (view.to - view.from);
  return {
    perTime,
    x: (time) => LAYOUT.left + (time - view.from) * perTime,
    time: (x) => view.from + (x - LAYOUT.left) / perTime,
    inner,
  };
}

/** What lies under a point: {rank, row: "plan" | "measured" | "memory"}, or null. */
function placeAt(plan, y) {
  const rows = rowsOf(plan);
  const rank = Math.floor((y - LAYOUT.top) / rows.pitch);
  if (y < LAYOUT.top || rank < 0 || rank >= plan.programs.length) return null;
  if (y < rows.top(rank) + LAYOUT.bar) return { rank, row: "plan" };
  if (y < rows.memoryTop(rank)) return { rank, row: plan.measured ? "measured" : "plan" };
  return { rank, row: "memory" };
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

class Chart {
  constructor(canvas, plan, style) {
    Object.assign(this, { canvas, plan, style, rows: rowsOf(plan) });
    this.context = canvas.getContext("2d");
  }

  /** `state` is {view, timing, unit, memoryScale, hover: {time, microbatch} | null}. */
  draw(state) {
    const width = this.canvas.clientWidth;
    const density = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * density);
    this.canvas.height = Math.round(this.rows.height * density);
    this.canvas.style.height = `${this.rows.height}px`;
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.context.clearRect(0, 0, width, this.rows.height);
    this.scale = scaleOf(state.view, width);
    this.context.font = '11px system-ui, "Helvetica Neue", Arial, sans-serif';
    this.context.textBaseline = "middle";
    this.drawNames(width);
    this.context.save();
    this.context.beginPath();
    this.context.rect(LAYOUT.left, 0, this.scale.inner, this.rows.height);
    this.context.clip();
    this.plan.programs.forEach((program, rank) => this.drawRank(rank, state));
    this.context.restore();
    this.drawAxis(state);
  }

  drawNames(width) {
    const { context, style, rows, plan } = this;
    plan.programs.forEach((program, rank) => {
      context.textAlign = "right";
      context.fillStyle = style.ink;
      context.fillText(`rank ${rank}`, LAYOUT.left - 8, rows.top(rank) + LAYOUT.bar / 2);
      context.fillStyle = style.muted;
      if (plan.measured) {
        context.fillText("measured", LAYOUT.left - 8, rows.measuredTop(rank) + LAYOUT.measured / 2);
      }
      const middle = rows.memoryTop(rank) + LAYOUT.memory / 2;
      context.fillText("memory", LAYOUT.left - 8, middle);
      context.textAlign = "left";
      context.fillText(`peak ${compact(plan.peaks[rank])}`, width - LAYOUT.right + 8, middle);
    });
  }

  drawRank(rank, state) {
    const { context, style, rows, scale } = this;
    const { starts, ends, makespan } = state.timing;
    context.fillStyle = style.idle;
    context.fillRect(scale.x(0), rows.top(rank), makespan * scale.perTime, LAYOUT.bar);
    this.plan.programs[rank].forEach((instruction, step) => {
      this.drawBar(instruction, starts[rank][step], ends[rank][step], {
        top: rows.top(rank), height: LAYOUT.bar, hover: state.hover,
      });
    });
    if (this.plan.measured) {
      const [first, last] = state.measuredWindow;
      context.fillStyle = style.idle;
      context.fillRect(scale.x(first), rows.measuredTop(rank),
        (last - first) * scale.perTime, LAYOUT.measured);
      for (const { instruction, start, end } of this.plan.measured[rank]) {
        this.drawBar(instruction, start, end, {
          top: rows.measuredTop(rank), height: LAYOUT.measured, hover: state.hover,
        });
      }
    }
    this.drawMemory(rank, state);
  }

  drawBar({ op, stage, microbatch }, start, end, { top, height, hover }) {
    const { context, style, scale } = this;
    const x = scale.x(start);
    const width = (end - start) * scale.perTime;
    if (x > LAYOUT.left + scale.inner || x + width < LAYOUT.left) return;
    const shades = style.shades[op];
    if (isMark(op)) {
      context.fillStyle = shades[0];
      context.beginPath();
      context.moveTo(x, top + height);
      context.lineTo(x, top - 3);
      context.lineTo(x + 5, top + 1);
      context.lineTo(x + 1, top + 4);
      context.lineTo(x + 1, top + height);
      context.fill();
      return;
    }
    context.fillStyle = shades[this.plan.chunkOfStage[stage]];
    context.fillRect(x, top, Math.max(width - (width > 3 ? 1 : 0), 0.4), height);
    if (hover && hover.microbatch === microbatch && width > 1) {
      context.strokeStyle = style.ink;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, top + 0.75, Math.max(width - 2.5, 0.5), height - 1.5);
    }
    const text = String(microbatch);
    if (text.length * 6.6 + 3 <= width) {
      context.fillStyle = style.ink;
      context.textAlign = "center";
      context.fillText(text, x + width / 2, top + height / 2 + 0.5);
    }
  }

  /** The memory held, as an area; a dashed line where the limit is. */
  drawMemory(rank, { timing, memoryScale }) {
    const { context, style, rows, scale, plan } = this;
    const bottom = rows.memoryTop(rank) + LAYOUT.memory;
    const y = (level) => bottom - (level / memoryScale) * (LAYOUT.memory - 3);
    context.beginPath();
    context.moveTo(scale.x(0), bottom);
    let level = 0;
    plan.programs[rank].forEach((instruction, step) => {
      [timing.starts[rank][step], timing.ends[rank][step]].forEach((time, k) => {
        context.lineTo(scale.x(time), y(level));
        level = plan.levels[rank][2 * step + k];
        context.lineTo(scale.x(time), y(level));
      });
    });
    context.lineTo(scale.x(timing.makespan), y(level));
    context.lineTo(scale.x(timing.makespan), bottom);
    context.fillStyle = style.memory;
    context.fill();
    context.strokeStyle = style.muted;
    context.lineWidth = 1;
    context.stroke();
    if (plan.limits) {
      context.setLineDash([5, 4]);
      context.strokeStyle = style.mark;
      context.beginPath();
      context.moveTo(scale.x(0), y(plan.limits[rank]));
      context.lineTo(scale.x(timing.makespan), y(plan.limits[rank]));
      context.stroke();
      context.setLineDash([]);
    }
  }

  /** Round times along the top, and the pointer's time. */
  drawAxis({ view, unit, hover }) {
    const { context, style, scale, rows } = this;
    const step = roundStep((view.to - view.from) / unit.divisor * (90 / scale.inner)) * unit.divisor;
    context.textAlign = "center";
    for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to * (1 + 1e-9); k++) {
      const x = scale.x(k * step);
      context.fillStyle = style.rule;
      context.fillRect(Math.round(x), LAYOUT.top - 7, 1, 5);
      context.fillStyle = style.muted;
      context.fillText(compact(k * step / unit.divisor), x, 10);
    }
    context.textAlign = "right";
    context.fillText(unit.name ? `time, ${unit.name}` : "time", LAYOUT.left - 8, 10);
    if (hover) {
      context.fillStyle = style.muted;
      context.fillRect(Math.round(scale.x(hover.time)), LAYOUT.top - 7, 1, rows.height);
    }
  }
}

/** Up to five significant digits. */
function compact(value) {
  const text = Math.abs(value) >= 1e5 ? value.toFixed(0) : value.toPrecision(5);
  return String(Number(text));
}
