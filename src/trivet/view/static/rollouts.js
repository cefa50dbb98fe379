// The rollouts of a step, or of an evaluation: a list, page by page, and one of them in full.

import { ask } from "./ask.js";
import { empty, fill, h } from "./dom.js";
import { number } from "./format.js";
import { tokenView } from "./tokens.js";
import { explainView } from "./explain.js";

const ROWS = 50;

export class RolloutsPage {
  constructor(app, query) {
    this.app = app;
    this.query = { run: "0", step: "", eval: "", line: "", offset: "0", sort: "line", env: "", contains: "", ...query };
    this.list = h("section", { class: "list", "aria-label": "Rollouts" });
    this.detail = h("section", { class: "detail", "aria-label": "The rollout", tabindex: -1 });
    this.bar = h("div", { class: "tools" });
    this.element = h("div", { class: "rollouts" }, this.bar, h("div", { class: "split" }, this.list, this.detail));
  }

  set(changed) {
    this.app.go("rollouts", { ...this.query, ...changed });
  }

  async refresh() {
    if (!this.query.eval) {
      const { data } = await ask("steps", { run: this.query.run });
      this.steps = data;
      if (!this.query.step && data.length) this.query.step = String(data[data.length - 1]);
    }
    if (!this.query.eval && !this.steps.length) {
      fill(this.bar, this.app.runPicker(this.query.run, (run) => this.set({ run, step: "", line: "" })));
      fill(this.detail);
      fill(this.list, empty("No rollouts yet", "The orchestrator writes rollouts/step_N when it hands over batch N. Supervised fine-tuning has none."));
      return;
    }
    const { step, run, sort, env, contains, offset } = this.query;
    let answer;
    try {
      answer = await ask("rollouts", { run, step, eval: this.query.eval, sort, env, contains, offset, limit: ROWS });
    } catch (error) {
      this.drawBar({ envs: [] });
      fill(this.list, empty(`Step ${step} has no rollouts`, error.message));
      fill(this.detail);
      return;
    }
    if (answer.isNew || !this.page) {
      this.page = answer.data;
      this.drawBar(answer.data);
      this.drawList(answer.data);
    }
    await this.refreshDetail();
  }

  async refreshDetail() {
    const line = this.query.line !== "" ? Number(this.query.line) : this.page.rows[0]?.line;
    if (line === undefined) { fill(this.detail); return; }
    const { data, isNew } = await ask("rollout", { run: this.query.run, step: this.query.step, eval: this.query.eval, line });
    if (!isNew && this.shownLine === line) return;
    this.shownLine = line;
    for (const row of this.list.querySelectorAll("[data-line]")) row.setAttribute("aria-current", row.dataset.line === String(line));
    fill(this.detail, rolloutView(data, { line }), data.samples.length ? explainView(data) : null);
  }

  drawBar({ envs }) {
    if (this.bar.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
    const index = this.steps?.indexOf(Number(this.query.step)) ?? -1;
    const step = (by) => { const found = this.steps?.[Math.max(0, index + by)]; if (found !== undefined) this.set({ step: found, line: "", offset: 0 }); };
    this.stepBy = step;
    const search = h("input", { type: "search", placeholder: "Text within…", value: this.query.contains, "aria-label": "Text within prompt or completion", onchange: (event) => this.set({ contains: event.target.value, offset: 0, line: "" }) });
    fill(this.bar, this.app.runPicker(this.query.run, (run) => this.set({ run, line: "", offset: 0 })),
      this.query.eval ? h("span", {}, `Evaluation of policy ${this.query.step} on ${this.query.eval} `, h("button", { type: "button", onclick: () => this.set({ eval: "", step: "", line: "", offset: 0 }) }, "To training"))
        : [h("button", { type: "button", title: "Step before ([)", onclick: () => step(-1) }, "‹"),
          h("label", {}, "step ", h("input", { type: "number", min: 0, value: this.query.step, "aria-label": "Step", onchange: (event) => this.set({ step: event.target.value, line: "", offset: 0 }) })),
          h("button", { type: "button", title: "Next step (])", onclick: () => step(1) }, "›"),
          h("span", { class: "hint" }, `of ${number(this.steps.at(-1))}`)],
      h("select", { "aria-label": "Order", onchange: (event) => this.set({ sort: event.target.value, offset: 0, line: "" }) },
        [["line", "in order"], ["-reward", "best reward first"], ["reward", "worst reward first"], ["-advantage", "greatest advantage first"], ["advantage", "least advantage first"]]
          .map(([value, words]) => h("option", { value, selected: value === this.query.sort }, words))),
      envs.length > 1 || this.query.env ? h("select", { "aria-label": "Environment", onchange: (event) => this.set({ env: event.target.value, offset: 0, line: "" }) },
        ["", ...envs].map((value) => h("option", { value, selected: value === this.query.env }, value || "all environments"))) : null,
      search);
  }

  drawList({ rows, num_rows: total, num_damaged: damaged }) {
    const offset = Number(this.query.offset);
    fill(this.list,
      h("p", { class: "hint" }, total ? `${offset + 1} to ${offset + rows.length} of ${number(total)} rollouts` : "No rollout fits.", damaged ? ` ${damaged} damaged lines were skipped.` : ""),
      h("ol", { role: "listbox", "aria-label": "Rollouts" }, rows.map((preview) => this.row(preview))),
      total > ROWS ? h("div", { class: "tools" },
        h("button", { type: "button", disabled: offset === 0, onclick: () => this.set({ offset: Math.max(0, offset - ROWS), line: "" }) }, "Before"),
        h("button", { type: "button", disabled: offset + ROWS >= total, onclick: () => this.set({ offset: offset + ROWS, line: "" }) }, "After")) : null);
  }

  row({ line, row, prompt, completion }) {
    return h("li", { "data-line": line, tabindex: 0, role: "option", onclick: () => this.set({ line }), onkeydown: (event) => { if (event.key === "Enter") this.set({ line }); } },
      h("span", { class: "reward", style: { background: rewardColour(row.reward) } }, number(row.reward)),
      h("span", { class: "who" }, row.group_id !== null ? `group ${row.group_id}` : `example ${row.example_id}`, ` #${row.index}`,
        row.advantage !== null ? ` · advantage ${number(row.advantage)}` : "", row.is_truncated ? " · cut" : "", row.num_turns > 1 ? ` · ${row.num_turns} turns` : ""),
      h("span", { class: "preview" }, h("i", {}, prompt), " › ", completion));
  }

  onKey(key) {
    const lines = this.page?.rows.map((row) => row.line) ?? [];
    const here = lines.indexOf(this.shownLine);
    if (key === "j" && here < lines.length - 1) this.set({ line: lines[here + 1] });
    else if (key === "k" && here > 0) this.set({ line: lines[here - 1] });
    else if (key === "[") this.stepBy?.(-1);
    else if (key === "]") this.stepBy?.(1);
  }

  /** Another rollout of the same page is shown without drawing the list anew. */
  adopt(query) {
    const rest = ({ line, ...others }) => JSON.stringify(Object.entries(others).filter(([, value]) => value !== "").map(([name, value]) => [name, String(value)]).sort());
    const defaults = { run: "0", offset: "0", sort: "line" };
    if (!this.page || rest({ ...defaults, ...query }) !== rest(this.query)) return false;
    this.query.line = query.line ?? "";
    return true;
  }
}

function rolloutView({ record, samples, fault }, { line }) {
  const versions = (record.versions ?? []).map(([version, length]) => `policy ${version}: ${length} tokens`);
  return h("article", {},
    h("h2", {}, record.group_id !== undefined ? `Group ${record.group_id}, rollout ${record.index}` : `Example ${record.example_id}, rollout ${record.index}`),
    h("dl", {}, [
      ["reward", number(record.reward)],
      ...(record.advantage !== undefined ? [["advantage", number(record.advantage)]] : []),
      ...Object.entries(record.scores ?? {}).map(([name, value]) => [name, number(value)]),
      ...(record.env ? [["environment", `${record.env}, example ${record.example_id}`]] : []),
      ["turns", number(record.num_turns)],
      ...(versions.length ? [["sampled by", versions.join(", ")]] : []),
      ...(record.is_truncated ? [["cut", record.ran_out_of_context ? "its context was full" : "at a length limit"]] : []),
      ["line", String(line)],
    ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h3", {}, "Prompt"), (record.prompt ?? []).map(messageView),
    h("h3", {}, "Completion"), (record.completion ?? []).map(messageView),
    fault ? h("p", { class: "fault" }, fault) : null,
    samples.length ? tokenView(samples) : null);
}

function messageView(message) {
  const calls = (message.tool_calls ?? []).map((call) => call?.function ?? call);
  return h("div", { class: `message ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "other"}` },
    h("b", { class: "role" }, String(message.role ?? "?"), message.tool_call_id ? h("small", {}, ` ${message.tool_call_id}`) : null),
    message.reasoning_content ? h("details", {}, h("summary", {}, "thinking"), h("pre", {}, String(message.reasoning_content))) : null,
    contentParts(message.content).map((words) => h("pre", {}, words)),
    calls.map((call) => h("div", { class: "call" }, h("b", {}, `calls ${call?.name ?? "?"}`), h("pre", {}, written(call?.arguments)))));
}

function contentParts(content) {
  if (content === null || content === undefined || content === "") return [];
  if (Array.isArray(content)) return content.map((part) => (typeof part?.text === "string" ? part.text : JSON.stringify(part, null, 1)));
  return [written(content)];
}

function written(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
}

function rewardColour(reward) {
  return `hsl(${Math.round(120 * Math.min(1, Math.max(0, reward)))} 60% 45% / 0.35)`;
}
