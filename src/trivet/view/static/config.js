// The configuration of each role; of several runs side by side, where what differs is marked.

import { ask } from "./ask.js";
import { empty, fill, h } from "./dom.js";

export class ConfigPage {
  constructor(app) {
    this.app = app;
    this.contains = "";
    this.onlyDifferent = false;
    this.body = h("div", {});
    const search = h("input", { type: "search", placeholder: "Key or value…", "aria-label": "Filter", oninput: (event) => { this.contains = event.target.value.toLowerCase(); this.draw(); } });
    const different = h("label", { hidden: app.shown().length < 2 }, h("input", { type: "checkbox", onchange: (event) => { this.onlyDifferent = event.target.checked; this.draw(); } }), "only what differs");
    this.element = h("div", {}, h("h1", {}, "Configuration"), h("div", { class: "tools" }, search, different), this.body);
  }

  async refresh() {
    const runs = this.app.shown();
    const answers = await Promise.all(runs.map((run) => ask("config", { run: run.index })));
    if (this.configs && answers.every((answer) => !answer.isNew)) return;
    this.configs = answers.map(({ data }, index) => ({ run: runs[index], roles: data }));
    this.draw();
  }

  draw() {
    const roles = [...new Set(this.configs.flatMap(({ roles: found }) => Object.keys(found)))].sort();
    if (!roles.length) { fill(this.body, empty("No configuration", "A run writes the resolved configuration of each role into configs/ when it starts.")); return; }
    fill(this.body, roles.map((role) => {
      const keys = [...new Set(this.configs.flatMap(({ roles: found }) => Object.keys(found[role] ?? {})))].sort();
      const rows = keys.map((key) => this.row(role, key)).filter(Boolean);
      return rows.length ? h("details", { open: true }, h("summary", {}, `${role} (${rows.length})`), h("table", { class: "config" },
        this.configs.length > 1 ? h("thead", {}, h("tr", {}, h("th", {}, "key"), this.configs.map(({ run }) => h("th", { style: { color: run.colour } }, run.name)))) : null,
        h("tbody", {}, rows))) : null;
    }));
  }

  row(role, key) {
    const values = this.configs.map(({ roles }) => roles[role]?.[key] ?? "–");
    const isDifferent = new Set(values).size > 1;
    if (this.onlyDifferent && !isDifferent) return null;
    if (this.contains && ![key, ...values].some((words) => words.toLowerCase().includes(this.contains))) return null;
    return h("tr", { class: isDifferent ? "different" : null }, h("th", { scope: "row" }, key), values.map((value) => h("td", {}, value)));
  }
}
