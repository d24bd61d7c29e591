"use strict";
// The page: sliders, figures, zoom and pan, tooltips. Data comes from html.py, times from
// retime.js, pictures from draw.js.

const data = JSON.parse(document.getElementById("data").textContent);
const OPS = Object.keys(data.meaning);
const SLIDERS = [["F", "T_F"], ["B", "T_B"], ["W", "T_W"], ["transfer", "transfer"]];

const plans = data.plans.map((plan) => ({
  ...plan,
  programs: plan.programs.map(parseProgram),
  inputs: plan.inputs.map((row) => row.map((places) => places || [])),
  measured: plan.measured && plan.measured.map((row) => row.map(([text, start, end]) => (
    { instruction: parseProgram(text)[0], start, end }))),
}));
const state = {
  totals: { ...data.base },
  view: { from: 0, to: 1 },
  hover: null,
  unit: data.unit,
  memoryScale: Math.max(...plans.flatMap((plan) => [...plan.peaks, ...(plan.limits || [])])),
};
let timings = [];
let charts = [];

const element = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`.replace(/^-0\.0/, "0.0");
const shown = (time) => `${compact(time / data.unit.divisor)} ${data.unit.name}`.trim();

/** First start and last end of a plan's measured bars. */
function measuredWindow(plan) {
  const bars = plan.measured.flat();
  return [Math.min(...bars.map((bar) => bar.start)), Math.max(...bars.map((bar) => bar.end))];
}

function fullView() {
  const last = plans.map((plan, k) => (
    Math.max(timings[k].makespan, plan.measured ? measuredWindow(plan)[1] : 0)));
  return { from: 0, to: Math.max(...last) * 1.005 || 1 };
}

function retimeAll() {
  timings = plans.map((plan) => (
    retime(plan, rescaled(plan.costs, data.base, state.totals, plan.programs.length))));
  showFigures();
}

function figureRow(name, timing, memory, messages) {
  const cells = [
    name, shown(timing.makespan), percent(timing.bubbleRateMakespan),
    shown(timing.longestSpan), percent(timing.bubbleRateSpan), memory, messages,
  ];
  return element("tr", {}, ...cells.map((text) => element("td", { textContent: text })));
}

function showFigures() {
  const body = document.querySelector("#figures tbody");
  body.replaceChildren();
  plans.forEach((plan, k) => {
    const timing = timings[k];
    const row = figureRow(plan.heading, timing, compact(Math.max(...plan.peaks)), plan.messages);
    Object.assign(row.dataset, { makespan: timing.makespan, longestSpan: timing.longestSpan });
    body.append(row);
    if (plan.measured) {
      const ran = plan.measured.map((row) => row.map((bar) => bar.instruction));
      const starts = plan.measured.map((row) => row.map((bar) => bar.start));
      const ends = plan.measured.map((row) => row.map((bar) => bar.end));
      body.append(figureRow("as measured", figuresOf(ran, starts, ends), "", ""));
    }
  });
  if (plans.length === 2) {
    const ratio = (figure) => `${(timings[1][figure] / timings[0][figure]).toFixed(3)} ×`;
    const cells = ["speed of the first against the second", ratio("makespan"), "",
      ratio("longestSpan"), "", "", ""];
    body.append(element("tr", {}, ...cells.map((text) => element("td", { textContent: text }))));
  }
}

function redraw() {
  charts.forEach((chart, k) => chart.draw({
    ...state,
    timing: timings[k],
    measuredWindow: plans[k].measured && measuredWindow(plans[k]),
  }));
}

function setTotal(name, value) {
  if (!Number.isFinite(value) || value < 0 || (name === "F" && value === 0)) return;
  state.totals[name] = value;
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    if (Number(input.value) !== value) input.value = value;
  }
  const wasFull = state.view.from === 0 && timings.length && state.view.to === fullView().to;
  retimeAll();
  if (wasFull) state.view = fullView();
  redraw();
}

function addSliders() {
  const box = document.getElementById("sliders");
  const reach = Math.max(data.base.F, data.base.B, data.base.W) * 2;
  for (const [name, label] of SLIDERS) {
    const range = { name, min: name === "F" ? reach / 400 : 0, max: reach, step: reach / 400 };
    const listen = (event) => setTotal(name, Number(event.target.value));
    const slider = element("input", { type: "range", ...range, oninput: listen });
    const number = element("input", { type: "number", name, min: 0, step: "any", oninput: listen });
    slider.setAttribute("aria-label", label);
    number.setAttribute("aria-label", `${label}, number`);
    slider.value = number.value = data.base[name];
    const words = data.costUnit ? `${label} (${data.costUnit})` : label;
    box.append(element("label", {}, element("span", { textContent: words }), slider, number));
  }
  document.getElementById("reset").onclick = () => {
    for (const [name] of SLIDERS) setTotal(name, data.base[name]);
  };
}

function addLegend() {
  const legend = document.getElementById("legend");
  const used = new Set(plans.flatMap((plan) => plan.programs.flat().map(({ op }) => op)));
  const chunks = Math.max(...plans.map((plan) => plan.numChunks));
  const swatch = (colour) => {
    const box = element("i", {});
    box.style.background = colour;
    return box;
  };
  for (const op of OPS.filter((name) => used.has(name))) {
    const shades = data.style.shadesOf[chunks][op].slice(0, isMark(op) ? 1 : chunks);
    legend.append(element("span", {}, ...shades.map(swatch), `${op}: ${data.meaning[op]}`));
  }
  const idle = swatch(data.style.idle);
  idle.style.outline = `1px solid ${data.style.rule}`;
  legend.append(element("span", {}, idle, "idle"));
  if (chunks > 1) legend.append("full shade: first chunk of a rank, lighter: later ones");
}

function addCharts() {
  const box = document.getElementById("charts");
  plans.forEach((plan, k) => {
    const canvas = element("canvas", { tabIndex: 0 });
    canvas.setAttribute("aria-label", `Timeline of ${plan.heading}`);
    box.append(element("h2", { textContent: plan.heading }), canvas);
    if (plan.note) box.append(element("p", { className: "note", textContent: plan.note }));
    charts.push(new Chart(canvas, plan, { ...data.style, shades: data.style.shadesOf[plan.numChunks] }));
    listenToChart(canvas, k);
  });
}

// ---- zoom and pan ----------------------------------------------------------

function moveView(from, to) {
  const all = fullView();
  const length = Math.min(to - from, all.to - all.from);
  const start = Math.min(Math.max(from, all.from), all.to - length);
  state.view = { from: start, to: start + length };
  redraw();
}

/** Factor below 1 zooms in; the time at share 0..1 of the view stays where it is. */
function zoomBy(factor, share = 0.5) {
  const { from, to } = state.view;
  const length = Math.max((to - from) * factor, fullView().to / 1e4);
  const fixed = from + share * (to - from);
  moveView(fixed - share * length, fixed + (1 - share) * length);
}

function panBy(share) {
  const { from, to } = state.view;
  moveView(from + share * (to - from), to + share * (to - from));
}

function listenToChart(canvas, k) {
  let dragged = null;
  const shareAt = (event) => {
    const { time } = charts[k].scale;
    const { from, to } = state.view;
    return (time(event.offsetX) - from) / (to - from);
  };
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoomBy(Math.exp(event.deltaY / 300), shareAt(event));
    else if (sideways) panBy(sideways / charts[k].scale.inner);
    else return; // plain vertical wheel scrolls the page
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoomBy(0.5, shareAt(event)));
  canvas.addEventListener("pointerdown", (event) => { dragged = event.offsetX; });
  window.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged !== null && event.buttons) {
      panBy((dragged - event.offsetX) / charts[k].scale.inner);
      dragged = event.offsetX;
    }
    point(k, event);
  });
  canvas.addEventListener("pointerleave", () => { state.hover = null; hideTip(); redraw(); });
  canvas.addEventListener("keydown", (event) => {
    const actions = {
      "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
      0: () => moveView(0, Infinity), ArrowLeft: () => panBy(-0.2), ArrowRight: () => panBy(0.2),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    actions[event.key]();
    event.preventDefault();
  });
}

// ---- tooltips --------------------------------------------------------------

function point(k, event) {
  const time = charts[k].scale.time(event.offsetX);
  const place = placeAt(plans[k], event.offsetY);
  const found = place && time >= 0 ? describe(k, place, time) : null;
  state.hover = { time, microbatch: found ? found.microbatch : null };
  redraw();
  if (!found) return hideTip();
  const tip = document.getElementById("tip");
  tip.textContent = found.text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

/** Text for a place and a time, and the micro-batch to point out. */
function describe(k, { rank, row }, time) {
  const plan = plans[k];
  if (row === "measured") return describeMeasured(plan, rank, time, timings[k]);
  if (time > timings[k].makespan) return null;
  if (row === "memory") {
    return { text: `rank ${rank} at ${shown(time)}\nholds ${compact(levelAt(k, rank, time))}` };
  }
  const activity = activityAt(plan, timings[k], rank, time);
  if (activity.end !== undefined) return describeGap(plan, rank, activity);
  const instruction = plan.programs[rank][activity.step];
  const start = timings[k].starts[rank][activity.step];
  const end = timings[k].ends[rank][activity.step];
  const held = plan.levels[rank][2 * activity.step];
  const text = `${named(plan, instruction)}\n${interval(start, end)}\nmemory held: ${compact(held)}`;
  return { text, microbatch: instruction.microbatch };
}

function named(plan, { text, op, stage, microbatch }) {
  const chunk = plan.numChunks > 1 ? `, chunk ${plan.chunkOfStage[stage]}` : "";
  return `${text}: ${data.meaning[op]}\nstage ${stage}${chunk}, micro-batch ${microbatch}`;
}

const interval = (start, end) => `${shown(start)} to ${shown(end)} (${shown(end - start)})`;

function describeGap(plan, rank, { start, end, cause, step }) {
  const lines = [`rank ${rank} is idle`, interval(start, end)];
  if (cause && cause.rank >= 0) {
    const waiting = plan.programs[rank][step].text;
    const maker = plan.programs[cause.rank][cause.step].text;
    lines.push(`${waiting} waits for ${maker} of rank ${cause.rank}`);
  } else if (step === null) {
    lines.push("it has no instructions left");
  }
  if (start === 0 && step === 0) lines.push("not in this rank's span");
  return { text: lines.join("\n") };
}

function describeMeasured(plan, rank, time, timing) {
  const bar = plan.measured[rank].find(({ start, end }) => start <= time && time < end);
  if (!bar) return null;
  const step = plan.programs[rank].findIndex(({ text }) => text === bar.instruction.text);
  const lines = [`measured ${named(plan, bar.instruction)}`, interval(bar.start, bar.end)];
  if (step >= 0) {
    lines.push(`planned ${interval(timing.starts[rank][step], timing.ends[rank][step])}`);
  }
  return { text: lines.join("\n"), microbatch: bar.instruction.microbatch };
}

function levelAt(k, rank, time) {
  const { starts, ends } = timings[k];
  let level = 0;
  plans[k].programs[rank].forEach((instruction, step) => {
    if (starts[rank][step] <= time) level = plans[k].levels[rank][2 * step];
    if (ends[rank][step] <= time) level = plans[k].levels[rank][2 * step + 1];
  });
  return level;
}

// ---- start -----------------------------------------------------------------

/** An address that ends in `#F=1&B=1.5&transfer=0.1` sets the sliders. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name] of SLIDERS) {
    if (wanted.has(name)) setTotal(name, Number(wanted.get(name)));
  }
}

addSliders();
addLegend();
addCharts();
retimeAll();
state.view = fullView();
redraw();
readAddress();
window.addEventListener("hashchange", readAddress);
window.addEventListener("resize", redraw);
for (const button of document.querySelectorAll("[data-zoom]")) {
  const factor = button.dataset.zoom;
  button.onclick = () => (factor === "all" ? moveView(0, Infinity) : zoomBy(Number(factor)));
}
