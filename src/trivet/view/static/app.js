// The frame: pages by the address after `#`, the runs, keys, and asking again every two seconds while the page is seen.

import { ask } from "./ask.js";
import { COLOURS } from "./chart.js";
import { ConfigPage } from "./config.js";
import { CurvesPage } from "./curves.js";
import { fill, h, table } from "./dom.js";
import { EvalsPage } from "./evals.js";
import { RolloutsPage } from "./rollouts.js";
import { SelectionPage } from "./selection.js";
import { TimelinePage } from "./timeline.js";

const PAGES = { curves: ["Curves", CurvesPage], timeline: ["Time line", TimelinePage], rollouts: ["Rollouts", RolloutsPage], evals: ["Evaluations", EvalsPage], config: ["Configuration", ConfigPage], selection: ["Selection", SelectionPage] };
const LIVE_MS = 2000, OVER_MS = 10000;
const THEME = "trivet-theme";
const KEYS = [["1 to 6", "pages"], ["[ ]", "step before, next step"], ["j k", "next rollout, rollout before"], ["arrows", "cursor of the chart in focus; Enter opens the step's rollouts, Esc ends the zoom"], ["t", "light or dark"], ["?", "this help"]];

class App {
  constructor() {
    this.main = document.getElementById("main");
    this.notice = document.getElementById("notice");
    this.hidden = new Set();
  }

  async start() {
    this.setTheme(localStorage.getItem(THEME));
    this.drawNav();
    this.drawHelp();
    this.runs = (await ask("runs")).data.map((run) => ({ ...run, colour: COLOURS[run.index % COLOURS.length], isOver: false }));
    document.title = `${this.runs.map((run) => run.name).join(", ")} – trivet`;
    this.drawRuns();
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.tick(); });
    await this.route();
  }

  /** The runs that are not switched off. */
  shown() {
    return this.runs.filter((run) => !this.hidden.has(run.index));
  }

  link(page, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    return `#/${page}?${new URLSearchParams(given)}`;
  }

  go(page, query = {}) {
    const target = this.link(page, query);
    if (location.hash === target) this.route(); else location.hash = target;
  }

  async route() {
    const [, name = "curves", search = ""] = /^#\/(\w*)\??(.*)$/.exec(location.hash) ?? [];
    const [, Page] = PAGES[name] ?? PAGES.curves;
    const query = Object.fromEntries(new URLSearchParams(search));
    const isSame = this.page instanceof Page && this.page.adopt?.(query);
    if (!isSame) {
      this.page?.leave?.();
      this.page = new Page(this, query);
      delete document.body.dataset.ready;
      fill(this.main, this.page.element);
    }
    for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.dataset.page === (PAGES[name] ? name : "curves"));
    await this.refresh();
    document.body.dataset.ready = PAGES[name] ? name : "curves";
    if (!performance.getEntriesByName("trivet-ready").length) performance.mark("trivet-ready");
    this.plan();
  }

  async refresh() {
    const page = this.page;
    try {
      await page.refresh();
      this.notice.hidden = true;
    } catch (error) {
      if (page !== this.page) return;
      const isGone = error instanceof TypeError;
      if (isGone) console.warn(error);
      this.notice.textContent = isGone ? "trivet view does not answer any more: what is shown is from before." : error.message;
      this.notice.hidden = false;
    }
  }

  plan() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.tick(), this.runs.every((run) => run.isOver) ? OVER_MS : LIVE_MS);
  }

  async tick() {
    if (!document.hidden) await this.refresh();
    this.plan();
  }

  /** A choice of the run, where a page shows one; nothing where there is only one. */
  runPicker(index, onPick) {
    if (this.runs.length < 2) return null;
    return h("select", { "aria-label": "Run", onchange: (event) => onPick(event.target.value) }, this.runs.map((run) => h("option", { value: run.index, selected: String(run.index) === String(index) }, run.name)));
  }

  drawNav() {
    fill(document.getElementById("nav"), Object.entries(PAGES).map(([name, [title]], index) => h("a", { href: `#/${name}`, "data-page": name, title: `key ${index + 1}` }, title)));
    document.getElementById("theme").addEventListener("click", () => this.toggleTheme());
    document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());
  }

  drawRuns() {
    fill(document.getElementById("runs"), this.runs.map((run) => h("button", {
      type: "button", class: "run", "aria-pressed": true, title: this.runs.length > 1 ? "Show or hide" : "The run", style: { borderColor: run.colour },
      onclick: (event) => this.toggleRun(run, event.currentTarget),
    }, run.name)));
  }

  toggleRun(run, button) {
    if (this.hidden.has(run.index)) this.hidden.delete(run.index);
    else if (this.shown().length > 1) this.hidden.add(run.index);
    button.setAttribute("aria-pressed", !this.hidden.has(run.index));
    this.route();
  }

  drawHelp() {
    const help = document.getElementById("help");
    fill(help, h("h2", {}, "Keys"), table(["key", "does"], KEYS, {}), h("form", { method: "dialog" }, h("button", {}, "Close")));
  }

  setTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    this.page?.charts?.forEach((chart) => chart.paint());
  }

  toggleTheme() {
    const isDark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    localStorage.setItem(THEME, isDark ? "light" : "dark");
    this.setTheme(isDark ? "light" : "dark");
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
    const pages = Object.keys(PAGES);
    if (/^[1-6]$/.test(event.key)) this.go(pages[Number(event.key) - 1]);
    else if (event.key === "t") this.toggleTheme();
    else if (event.key === "?") document.getElementById("help").showModal();
    else this.page?.onKey?.(event.key);
  }
}

new App().start().catch((error) => {
  const notice = document.getElementById("notice");
  notice.textContent = `The page cannot start: ${error.message}`;
  notice.hidden = false;
});
