// The first page: what each run does now, and its curves, all runs in each chart.

import { ask } from "./ask.js";
import { Chart } from "./chart.js";
import { empty, fill, h } from "./dom.js";
import { number } from "./format.js";

const SHOWN = [
  ["orchestrator:reward/mean", "Reward"],
  ["trainer:loss/mean", "Loss"],
  ["trainer:entropy/mean", "Entropy"],
  ["trainer:mismatch_kl/mean", "Mismatch KL"],
  ["orchestrator:probe/mismatch", "Probe mismatch (nats)"],
  ["orchestrator:batch/off_policy_level/mean", "Staleness (policies behind)"],
  ["trainer:perf/throughput", "Throughput (tokens/s)"],
  ["trainer:time/step", "Step time (s)"],
  ["trainer:time/wait_for_batch", "Trainer waits for a batch (s)"],
  ["trainer:optim/grad_norm", "Gradient norm"],
  ["orchestrator:completion_len/mean", "Completion length (tokens)"],
  ["orchestrator:is_truncated/mean", "Truncated (share)"],
  ["orchestrator:error/mean", "Failed (share)"],
];
const STORE = "trivet-metrics";

export class CurvesPage {
  constructor(app) {
    this.app = app;
    this.added = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    this.zoom = { from: null, to: null };
    this.options = { smooth: 0, log: false };
    this.charts = new Map();
    this.status = h("section", { class: "status", "aria-label": "What the runs do" });
    this.grid = h("section", { class: "charts", "aria-label": "Curves" });
    this.list = h("datalist", { id: "metric-names" });
    this.zoomed = h("button", { type: "button", hidden: true, onclick: () => this.setZoom(null, null) }, "All steps");
    this.element = h("div", {}, this.status, this.tools(), this.grid);
  }

  tools() {
    const name = h("input", { list: "metric-names", placeholder: "Add a metric…", "aria-label": "Add a metric", size: 34 });
    const add = () => { if (name.value.includes(":")) { this.add(name.value.trim()); name.value = ""; } };
    name.addEventListener("change", add);
    name.addEventListener("focus", () => this.loadNames(), { once: true });
    const smooth = h("select", { "aria-label": "Smoothing", onchange: (event) => this.setOption({ smooth: Number(event.target.value) }) },
      [["0", "not smoothed"], ["0.6", "smoothed"], ["0.9", "smoothed more"], ["0.98", "smoothed most"]].map(([value, text]) => h("option", { value }, text)));
    const log = h("input", { type: "checkbox", onchange: (event) => this.setOption({ log: event.target.checked }) });
    return h("div", { class: "tools" }, name, this.list, smooth, h("label", {}, log, "log scale"), this.zoomed,
      h("span", { class: "hint" }, "Drag to zoom, double-click for all, click for the step's rollouts. A band is the least and greatest value within a point."));
  }

  setOption(changed) {
    this.options = { ...this.options, ...changed };
    this.draw();
  }

  setZoom(from, to) {
    this.zoom = { from, to };
    this.zoomed.hidden = from === null;
    this.refresh();
  }

  add(metric) {
    if (!this.added.includes(metric) && !SHOWN.some(([known]) => known === metric)) this.added.push(metric);
    localStorage.setItem(STORE, JSON.stringify(this.added));
    this.refresh();
  }

  remove(metric) {
    this.added = this.added.filter((other) => other !== metric);
    localStorage.setItem(STORE, JSON.stringify(this.added));
    this.charts.get(metric)?.close();
    this.charts.get(metric)?.element.remove();
    this.charts.delete(metric);
  }

  async loadNames() {
    const names = await Promise.all(this.app.shown().map(async (run) => (await ask("metrics", { run: run.index })).data));
    fill(this.list, [...new Set(names.flat())].sort().map((value) => h("option", { value })));
  }

  async refresh() {
    const names = [...SHOWN.map(([name]) => name), ...this.added];
    const runs = this.app.shown();
    const [answers] = await Promise.all([
      Promise.all(runs.map((run) => ask("series", { run: run.index, names: names.join(","), points: 1000, from: this.zoom.from, to: this.zoom.to }))),
      this.refreshStatus(runs),
    ]);
    const key = JSON.stringify([names, runs.map((run) => run.index), this.zoom]);
    if (key === this.drawnKey && answers.every((answer) => !answer.isNew)) return;
    this.drawnKey = key;
    this.answers = answers.map((answer, index) => ({ run: runs[index], ...answer.data }));
    this.draw();
  }

  draw() {
    if (!this.answers) return;
    const hasAny = this.answers.some(({ curves }) => Object.values(curves).some((curve) => curve?.steps.length));
    if (!hasAny) {
      for (const chart of this.charts.values()) chart.close();
      this.charts.clear();
      fill(this.grid, empty("No step has ended yet",
        "Curves appear with the first step: the trainer and the orchestrator write a line each into metrics/ when they end one.",
        this.zoom.from !== null ? "Or there is none within the zoom: “All steps” shows everything." : null));
      return;
    }
    if (!this.charts.size) fill(this.grid);
    for (const [metric, title] of [...SHOWN, ...this.added.map((name) => [name, name])]) {
      const curves = this.answers
        .map(({ run, curves: found }) => ({ name: run.name, colour: run.colour, ...(found[metric] ?? { steps: [], mean: [] }) }));
      const isAdded = this.added.includes(metric);
      if (!isAdded && !curves.some((curve) => curve.steps.length) && !this.charts.has(metric)) continue;
      this.chart(metric, title, isAdded).set(curves, this.options);
    }
  }

  chart(metric, title, isAdded) {
    if (!this.charts.has(metric)) {
      const chart = new Chart(title, { onPick: (step) => this.app.go("rollouts", { step }), onZoom: (from, to) => this.setZoom(from, to) });
      chart.element.dataset.metric = metric;
      if (isAdded) chart.element.querySelector("figcaption").append(h("button", { type: "button", class: "plain", title: "Remove", onclick: () => this.remove(metric) }, "×"));
      this.charts.set(metric, chart);
      this.grid.append(chart.element);
    }
    return this.charts.get(metric);
  }

  async refreshStatus(runs) {
    const found = await Promise.all(runs.map(async (run) => [run, (await ask("status", { run: run.index })).data]));
    for (const [run, status] of found) run.isOver = status.is_over;
    fill(this.status, found.map(([run, status]) => statusCard(run, status)));
  }

  leave() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function statusCard(run, status) {
  const share = status.max_steps ? Math.min(1, status.step / status.max_steps) : 0;
  return h("article", { class: `card state-${String(status.state ?? "none").replace(" ", "-")}`, style: { borderLeftColor: run.colour } },
    h("h2", {}, run.name, status.state ? h("span", { class: "badge" }, status.state) : null),
    status.fault ? h("p", { class: "fault" }, status.fault) : null,
    status.max_steps ? h("progress", { max: 1, value: share, "aria-label": `step ${status.step} of ${status.max_steps}` }) : null,
    h("ul", {}, status.lines.map((line) => h("li", {}, line))),
    status.num_damaged ? h("p", { class: "fault" }, `${number(status.num_damaged)} damaged ${status.num_damaged === 1 ? "line was" : "lines were"} skipped.`) : null);
}
