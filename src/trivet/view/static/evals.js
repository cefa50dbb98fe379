// Evaluations by policy: a curve for each environment, and the table with links to the rollouts.

import { ask } from "./ask.js";
import { Chart } from "./chart.js";
import { empty, fill, h, table } from "./dom.js";
import { number, percent } from "./format.js";

export class EvalsPage {
  constructor(app) {
    this.app = app;
    this.charts = new Map();
    this.grid = h("section", { class: "charts wide" });
    this.tables = h("section", {});
    this.element = h("div", {}, h("h1", {}, "Evaluations"), this.grid, this.tables);
  }

  async refresh() {
    const runs = this.app.shown();
    const answers = await Promise.all(runs.map((run) => ask("evals", { run: run.index })));
    if (this.isDrawn && answers.every((answer) => !answer.isNew)) return;
    this.isDrawn = true;
    const found = answers.map(({ data }, index) => ({ run: runs[index], results: data }));
    const names = [...new Set(found.flatMap(({ results }) => results.map((result) => result.name)))].sort();
    if (!names.length) {
      fill(this.tables, empty("No evaluation yet", "With [orchestrator.eval] a run evaluates itself every so many policies; `uv run eval` does it afterwards. Both write into evals/."));
      return;
    }
    for (const name of names) this.chart(name).set(found.map(({ run, results }) => curve(run, results, name)), { smooth: 0, log: false });
    fill(this.tables, found.map(({ run, results }) => [found.length > 1 ? h("h2", {}, run.name) : null, this.table(run, results)]));
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const chart = new Chart(`${name} (mean reward)`, { onPick: (step) => this.app.go("rollouts", { run: this.app.shown()[0].index, step, eval: name }) });
      this.charts.set(name, chart);
      this.grid.append(chart.element);
    }
    return this.charts.get(name);
  }

  table(run, results) {
    return table(["policy", "environment", "mean reward", "± (95 %)", "pass", "examples", "failed", "cut", "rollouts"],
      results.map(({ step, name, summary, fault }) => {
        const link = h("a", { href: this.app.link("rollouts", { run: run.index, step, eval: name }) }, "look");
        if (!summary) return [step, name, fault || "goes on", "", "", "", "", "", link];
        const pass = Object.entries(summary.pass_at).map(([j, estimate]) => `@${j} ${percent(estimate.value)}`).join(" ");
        return [step, name, number(summary.avg), summary.ci95 === null ? "–" : number(summary.ci95), pass || "–", number(summary.num_examples), number(summary.num_failed),
          summary.truncated === null ? "–" : percent(summary.truncated), link];
      }), { class: "data" });
  }

  leave() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function curve(run, results, name) {
  const mine = results.filter((result) => result.name === name && result.summary?.avg !== null && result.summary);
  const half = (summary) => summary.ci95 ?? 0;
  return {
    name: run.name, colour: run.colour, steps: mine.map((result) => result.step), mean: mine.map(({ summary }) => summary.avg),
    low: mine.map(({ summary }) => summary.avg - half(summary)), high: mine.map(({ summary }) => summary.avg + half(summary)),
  };
}
