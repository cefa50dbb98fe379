// What selection does: how what was trained differs from what was sampled, and what each cause adds to that.

import { ask } from "./ask.js";
import { empty, fill, h, table } from "./dom.js";
import { number } from "./format.js";

const TITLES = { tokens: "Sampled tokens of a rollout", reward: "Reward", difficulty: "Difficulty (minus the mean reward of the example's other groups)", latency_s: "Seconds from dispatch to the end" };

export class SelectionPage {
  constructor(app, query) {
    this.app = app;
    this.query = { run: "0", ...query };
    this.element = h("div", { class: "selection" });
  }

  async refresh() {
    const { data, isNew } = await ask("selection", { run: this.query.run });
    if (!isNew && this.isDrawn) return;
    this.isDrawn = true;
    const picker = this.app.runPicker(this.query.run, (run) => this.app.go("selection", { run }));
    if (data.fault) { fill(this.element, picker, empty("Nothing was selected yet", data.fault)); return; }
    const total = Object.values(data.num_groups).reduce((sum, count) => sum + count, 0);
    fill(this.element, picker,
      h("p", {}, `${number(total)} groups ended: ${Object.entries(data.num_groups).map(([cause, count]) => `${number(count)} ${cause}`).join(", ")}.`),
      data.warnings.map((text) => h("p", { class: "fault" }, text)),
      data.biases.map(biasView));
  }
}

function biasView({ quantity, num_unknown: unknown, sampled_mean: sampled, trained_mean: trained, bias, interval, causes }) {
  const between = ([low, high]) => `${number(low)} to ${number(high)}`;
  const rows = causes.map((cause) => [cause.cause, number(cause.num_groups), number(cause.mean), number(cause.effect), between(cause.interval)]);
  return h("section", {}, h("h3", {}, TITLES[quantity] ?? quantity),
    h("p", { class: "hint" }, `Sampled ${number(sampled)}, trained ${number(trained)}: a bias of ${number(bias)}, 95 % interval ${between(interval)}.${unknown ? ` Unknown for ${number(unknown)} groups.` : ""}`),
    table(["cause", "groups", "mean", "adds to the bias", "95 % interval"], rows));
}
