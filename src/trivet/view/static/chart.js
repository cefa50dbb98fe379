// A line chart of uPlot: a curve for each run, the range that each point stands for, a cursor that all charts share.

import { fill, h } from "./dom.js";
import { number } from "./format.js";

export const COLOURS = ["#2f6fde", "#d9622b", "#2a9d6f", "#a050c8", "#c19a1b", "#5b6470", "#d13f7b", "#2aa5b8"];

const HEIGHT = 190;
const SHARED = ["mousemove", "mouseleave"]; // events of the cursor; a drag is of one chart
const STEPS = [1, 2, 5].flatMap((digit) => Array.from({ length: 9 }, (_, power) => digit * 10 ** power)).sort((one, other) => one - other);

export class Chart {
  /**
   * @param title what is drawn; @param hooks `{ onPick(step), onZoom(from, to) }`, a zoom of nulls is back to everything.
   */
  constructor(title, hooks = {}) {
    this.title = title;
    this.hooks = hooks;
    this.curves = []; // { name, colour, steps, mean, low, high }
    this.now = h("span", { class: "now" });
    this.plot = h("div", { class: "canvas" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, title), this.now), this.plot);
    this.watch = new ResizeObserver(() => this.chart?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.watch.observe(this.plot);
  }

  close() {
    this.watch.disconnect();
    this.chart?.destroy();
  }

  /** Draws again, in the colours of the theme. */
  paint() {
    this.chart?.redraw(false, true);
  }

  set(curves, options) {
    this.curves = curves;
    const data = joined(curves, options);
    const kind = JSON.stringify([options.log, curves.map((curve) => [curve.colour, Boolean(curve.low)])]);
    if (this.kind === kind) this.chart.setData(data);
    else {
      this.chart?.destroy();
      this.kind = kind;
      this.chart = new uPlot(this.settings(options), data, this.plot);
      this.listen(this.chart.over);
    }
    const ends = curves.filter((curve) => curve.mean.length);
    this.chart.ctx.canvas.setAttribute("aria-label", ends.length
      ? `${this.title}. ${ends.map((curve) => `${curve.name}: from ${number(curve.mean[0])} at step ${curve.steps[0]} to ${number(curve.mean.at(-1))} at step ${curve.steps.at(-1)}`).join("; ")}. Arrow keys move the cursor.`
      : `${this.title}: nothing yet`);
    this.showValues();
  }

  settings({ log }) {
    const ink = () => colour("--quiet");
    const axis = { stroke: ink, grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const line = (curve) => ({ stroke: curve.colour, width: 1.5, spanGaps: true, points: { fill: curve.colour, size: 4 } });
    const edge = { width: 0, spanGaps: true, points: { show: false } };
    const first = (index) => 1 + 3 * index; // of the three series of a curve: drawn, high, low
    return {
      width: this.plot.clientWidth || 360, height: HEIGHT, legend: { show: false },
      scales: { x: { time: false, range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { distr: log ? 3 : 1 } },
      series: [{}, ...this.curves.flatMap((curve) => [line(curve), edge, edge])],
      bands: this.curves.flatMap((curve, index) => (curve.low ? [{ series: [first(index) + 1, first(index) + 2], fill: `${curve.colour}2e` }] : [])),
      axes: [{ ...axis, incrs: STEPS, size: 24, gap: 2, values: (_, marks) => marks.map(number) }, { ...axis, size: 54, values: (_, marks) => marks.map((mark) => (mark === null ? "" : number(mark))) }],
      cursor: { y: false, drag: { setScale: false, dist: 5 }, sync: { key: "trivet", filters: { pub: (type) => SHARED.includes(type) } } },
      hooks: {
        setCursor: [() => this.showValues()],
        setSelect: [(plot) => {
          if (!plot.select.width) return;
          const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((x) => Math.max(0, Math.round(plot.posToVal(x, "x"))));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (to > from) this.hooks.onZoom?.(from, to);
        }],
      },
    };
  }

  /** The values under the cursor; without one the newest values. */
  showValues() {
    const { idx } = this.chart?.cursor ?? {};
    const step = idx === null || idx === undefined ? null : this.chart.data[0][idx];
    const found = this.curves.filter((curve) => curve.steps.length).map((curve) => [curve, step === null ? curve.steps.length - 1 : curve.steps.indexOf(step)]);
    fill(this.now, step === null ? null : `step ${step}`, found.filter(([, index]) => index >= 0).map(([curve, index]) => h("span", { style: { color: curve.colour } },
      number(curve.mean[index]) + (step !== null && curve.low ? ` (${number(curve.low[index])} to ${number(curve.high[index])})` : ""))));
  }

  listen(over) {
    over.tabIndex = 0;
    over.addEventListener("mousedown", () => over.focus());
    over.addEventListener("click", () => this.pick());
    over.addEventListener("dblclick", () => this.hooks.onZoom?.(null, null));
    over.addEventListener("blur", () => this.chart.setCursor({ left: -10, top: -10 }));
    over.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const [steps] = this.chart.data;
    if (!steps.length) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -steps.length, End: steps.length }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      const next = Math.min(steps.length - 1, Math.max(0, (this.chart.cursor.idx ?? steps.length - 1) + by));
      this.chart.setCursor({ left: this.chart.valToPos(steps[next], "x"), top: 0 });
    } else if (event.key === "Enter") this.pick();
    else if (event.key === "Escape") this.hooks.onZoom?.(null, null);
  }

  pick() {
    const { idx } = this.chart.cursor;
    if (idx !== null && idx !== undefined) this.hooks.onPick?.(this.chart.data[0][idx]);
  }
}

/** The curves as uPlot takes them: all steps, and for each curve what is drawn, the greatest and the least values. */
function joined(curves, { smooth, log }) {
  const shown = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  return uPlot.join(curves.map(({ steps, mean, low, high }) => [steps, smoothed(mean, smooth), high ?? mean, low ?? mean].map((values, index) => (index ? shown(values) : values))));
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

/** Exponential average with the bias of its start taken out; weight 0 leaves the values as they are. */
function smoothed(values, weight) {
  if (!weight) return values;
  let average = 0, total = 0;
  return values.map((value) => {
    average = average * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return average / total;
  });
}
