// A line chart on a canvas: a curve for each run, the range that each point stands for, a cursor that all charts share.

import { h, fill } from "./dom.js";
import { number, ticks } from "./format.js";

const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
export const COLOURS = ["#2f6fde", "#d9622b", "#2a9d6f", "#a050c8", "#c19a1b", "#5b6470", "#d13f7b", "#2aa5b8"];

const charts = new Set();
let cursor = null; // the step under the pointer, in all charts

function setCursor(step) {
  cursor = step;
  for (const chart of charts) chart.paint();
}

export class Chart {
  /**
   * @param title what is drawn; @param hooks `{ onPick(step), onZoom(from, to) }`, a zoom of nulls is back to everything.
   */
  constructor(title, hooks = {}) {
    this.title = title;
    this.hooks = hooks;
    this.curves = []; // { name, colour, steps, mean, low, high }
    this.options = { smooth: 0, log: false };
    this.drag = null;
    this.canvas = h("canvas", { tabindex: 0, role: "img" });
    this.now = h("span", { class: "now" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, title), this.now), this.canvas, this.tip);
    this.listen();
    charts.add(this);
    this.watch = new ResizeObserver(() => this.paint());
    this.watch.observe(this.canvas);
  }

  close() {
    charts.delete(this);
    this.watch.disconnect();
  }

  set(curves, options) {
    this.curves = curves.map((curve) => ({ ...curve, drawn: smoothed(curve.mean, options.smooth) }));
    this.options = options;
    const ends = this.curves.filter((curve) => curve.mean.length);
    fill(this.now, ends.map((curve) => h("span", { style: { color: curve.colour } }, number(curve.mean[curve.mean.length - 1]))));
    this.canvas.setAttribute("aria-label", ends.length
      ? `${this.title}. ${ends.map((curve) => `${curve.name}: from ${number(curve.mean[0])} at step ${curve.steps[0]} to ${number(curve.mean.at(-1))} at step ${curve.steps.at(-1)}`).join("; ")}. Arrow keys move the cursor.`
      : `${this.title}: nothing yet`);
    this.paint();
  }

  scales() {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const { steps, mean, low, high } of this.curves) {
      if (!steps.length) continue;
      x0 = Math.min(x0, steps[0]);
      x1 = Math.max(x1, steps[steps.length - 1]);
      for (const values of [low ?? mean, high ?? mean]) {
        for (const value of values) {
          if (this.options.log && value <= 0) continue;
          if (value < y0) y0 = value;
          if (value > y1) y1 = value;
        }
      }
    }
    if (!(y0 <= y1)) return null;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 1; y0 = this.options.log ? y0 / 2 : y0 - room; y1 += room; }
    const map = this.options.log ? Math.log10 : (value) => value;
    const [m0, m1] = [map(y0), map(y1)];
    const room = (m1 - m0) * 0.05;
    const { width, height } = this;
    return {
      x0, x1, y0, y1, m0: m0 - room, m1: m1 + room,
      x: (step) => LEFT + ((step - x0) / (x1 - x0)) * (width - LEFT - RIGHT),
      y: (value) => {
        const mapped = this.options.log ? (value > 0 ? Math.log10(value) : m0 - room) : value;
        return TOP + (1 - (mapped - m0 + room) / (m1 - m0 + 2 * room)) * (height - TOP - BOTTOM);
      },
      step: (x) => x0 + ((x - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0),
    };
  }

  paint() {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    if (!this.width) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(this.width * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--quiet"), grid = style.getPropertyValue("--grid");
    context.font = "11px system-ui, sans-serif";
    const scale = this.scale = this.scales();
    if (!scale) {
      context.fillStyle = ink;
      context.textAlign = "center";
      context.fillText("nothing yet", this.width / 2, this.height / 2);
      this.tip.hidden = true;
      return;
    }
    this.paintGrid(context, scale, ink, grid);
    for (const curve of this.curves) this.paintCurve(context, scale, curve);
    this.paintCursor(context, scale, ink);
  }

  paintGrid(context, scale, ink, grid) {
    context.strokeStyle = grid;
    context.fillStyle = ink;
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const marks = this.options.log
      ? ticks(scale.m0, scale.m1, 5).map((power) => 10 ** power)
      : ticks(scale.m0, scale.m1, 5);
    for (const value of marks) {
      const y = Math.round(scale.y(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(this.width - RIGHT, y);
      context.stroke();
      context.fillText(number(value), LEFT - 6, y);
    }
    context.textBaseline = "top";
    context.fillText("step", LEFT - 6, this.height - BOTTOM + 5);
    for (const step of ticks(scale.x0, scale.x1, Math.max(2, this.width / 90)).filter(Number.isInteger)) {
      context.textAlign = scale.x(step) > this.width - 24 ? "right" : "center";
      context.fillText(number(step), scale.x(step), this.height - BOTTOM + 5);
    }
  }

  paintCurve(context, scale, { steps, drawn, low, high, colour }) {
    if (low && high) {
      context.fillStyle = colour;
      context.globalAlpha = 0.18;
      context.beginPath();
      steps.forEach((step, index) => context.lineTo(scale.x(step), scale.y(high[index])));
      for (let index = steps.length - 1; index >= 0; index -= 1) context.lineTo(scale.x(steps[index]), scale.y(low[index]));
      context.fill();
      context.globalAlpha = 1;
    }
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    steps.forEach((step, index) => context.lineTo(scale.x(step), scale.y(drawn[index])));
    context.stroke();
    if (steps.length < 30) {
      for (let index = 0; index < steps.length; index += 1) {
        context.beginPath();
        context.arc(scale.x(steps[index]), scale.y(drawn[index]), 2, 0, 7);
        context.fill();
      }
    }
  }

  paintCursor(context, scale, ink) {
    if (this.drag) {
      context.fillStyle = ink;
      context.globalAlpha = 0.15;
      context.fillRect(this.drag.from, TOP, this.drag.to - this.drag.from, this.height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    const found = cursor === null ? [] : this.curves.filter((curve) => curve.steps.length).map((curve) => [curve, nearest(curve.steps, cursor)]);
    this.tip.hidden = !found.length || !this.isUnderPointer;
    if (!found.length) return;
    const x = Math.round(scale.x(found[0][0].steps[found[0][1]])) + 0.5;
    context.strokeStyle = ink;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, this.height - BOTTOM);
    context.stroke();
    for (const [curve, index] of found) {
      context.fillStyle = curve.colour;
      context.beginPath();
      context.arc(scale.x(curve.steps[index]), scale.y(curve.drawn[index]), 3.5, 0, 7);
      context.fill();
    }
    if (this.tip.hidden) return;
    fill(this.tip, h("b", {}, `step ${found[0][0].steps[found[0][1]]}`), found.map(([curve, index]) => h("div", { style: { color: curve.colour } },
      `${this.curves.length > 1 ? `${curve.name} ` : ""}${number(curve.mean[index])}${curve.low ? ` (${number(curve.low[index])} to ${number(curve.high[index])})` : ""}`)));
    this.tip.style.left = `${Math.min(Math.max(0, x + 10), Math.max(0, this.width - this.tip.offsetWidth))}px`;
  }

  listen() {
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      this.isUnderPointer = true;
      if (this.drag) this.drag.to = at(event);
      setCursor(this.scale.step(at(event)));
    });
    this.canvas.addEventListener("pointerleave", () => { this.isUnderPointer = false; this.drag = null; setCursor(null); });
    this.canvas.addEventListener("pointerdown", (event) => { if (this.scale) this.drag = { from: at(event), to: at(event) }; });
    this.canvas.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (!drag || !this.scale) return;
      const [from, to] = [drag.from, at(event)].sort((one, other) => one - other).map((x) => Math.round(this.scale.step(x)));
      if (Math.abs(drag.from - at(event)) < 5) this.pick();
      else if (to > from) this.hooks.onZoom?.(Math.max(0, from), Math.max(0, to));
    });
    this.canvas.addEventListener("dblclick", () => this.hooks.onZoom?.(null, null));
    this.canvas.addEventListener("blur", () => { this.isUnderPointer = false; setCursor(null); });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const steps = this.curves.find((curve) => curve.steps.length)?.steps;
    if (!steps) return;
    const here = cursor === null ? steps.length - 1 : nearest(steps, cursor);
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -steps.length, End: steps.length }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      this.isUnderPointer = true;
      setCursor(steps[Math.min(steps.length - 1, Math.max(0, here + by))]);
    } else if (event.key === "Enter") this.pick();
    else if (event.key === "Escape") this.hooks.onZoom?.(null, null);
  }

  pick() {
    const curve = this.curves.find((candidate) => candidate.steps.length);
    if (curve && cursor !== null) this.hooks.onPick?.(curve.steps[nearest(curve.steps, cursor)]);
  }
}

/** Index of the step nearest to `step`, by halving. */
export function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

/** Exponential average with the bias of its start taken out; weight 0 leaves the values as they are. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let average = 0, total = 0;
  return values.map((value) => {
    average = average * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return average / total;
  });
}
