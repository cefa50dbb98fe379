// Who waits for whom: what each role did in each of some steps, next to each other in time; and the shares over the whole run.

import { ask } from "./ask.js";
import { empty, fill, h } from "./dom.js";
import { clock, duration, percent } from "./format.js";

const LANES = ["orchestrator", "inference", "trainer"];
const AWAITED = [...LANES, "disk"];
const SVG = "http://www.w3.org/2000/svg";
const SEEN = 0.0005; // of the whole; less is not drawn
const LEFT = 96, LANE = 46, TOP = 24;
const WORDS = { load: "loads", commit: "commit", restart: "restart", serverdown: "server marked unhealthy", serverup: "server back", start: "start", stop: "stop", evaluate: "evaluation" };
const COLOURS = {
  "forward and backward": "var(--blue)", optimizer: "var(--violet)", "publishes weights": "var(--green)", checkpoint: "var(--brown)",
  "other work": "var(--grey)", "generates rollouts": "var(--on-inference)",
};

export class TimelinePage {
  constructor(app, query) {
    this.app = app;
    this.query = { run: query.run ?? "0", last: query.last ?? "", steps: query.steps ?? "12" };
    this.shares = h("section", { class: "shares" });
    this.plot = h("section", { class: "plot" });
    this.list = h("section", {});
    this.element = h("div", {}, h("h1", {}, "Who waits for whom"), this.tools(), this.plot, this.shares, this.list);
  }

  tools() {
    const set = (changed) => this.app.go("timeline", { ...this.query, ...changed });
    this.where = h("output", {});
    return h("div", { class: "tools" }, this.app.runPicker(this.query.run, (run) => set({ run })),
      h("button", { type: "button", title: "Earlier ([)", onclick: () => this.move(-1) }, "‹"), this.where,
      h("button", { type: "button", title: "Later (])", onclick: () => this.move(1) }, "›"),
      h("button", { type: "button", onclick: () => set({ last: "" }) }, "Newest"),
      h("select", { "aria-label": "Steps shown", onchange: (event) => set({ steps: event.target.value }) },
        ["4", "12", "40", "120", "400"].map((value) => h("option", { value, selected: value === this.query.steps }, `${value} steps`))),
      h("span", { class: "legend" }, AWAITED.map((role) => h("span", { class: `waits on-${role}` }, `waits for ${role === "disk" ? "the disk" : role}`))),
      h("span", { class: "hint" }, "The order within a step is that of the role's loop; the lengths are measured."));
  }

  move(direction) {
    if (!this.data) return;
    const by = Math.max(1, Math.floor(Number(this.query.steps) / 2)) * direction;
    const last = Math.max(Number(this.query.steps), this.data.last_step + by);
    this.app.go("timeline", { ...this.query, last: last >= this.data.newest_step ? "" : last });
  }

  onKey(key) {
    if (key === "[") this.move(-1);
    else if (key === "]") this.move(1);
  }

  async refresh() {
    const { data, isNew } = await ask("timeline", this.query);
    if (!isNew && this.data) return;
    this.data = data;
    if (!data.spans.length) {
      fill(this.shares);
      fill(this.list);
      fill(this.plot, empty("No step has ended yet", "The time line is made of the times that each role measures in a step; it appears with the first."));
      return;
    }
    this.where.textContent = `steps ${data.first_step} to ${data.last_step} of ${data.newest_step}`;
    this.draw(data);
  }

  draw(data) {
    const start = Math.min(...data.spans.map((span) => span.start)), end = Math.max(...data.spans.map((span) => span.end));
    const width = Math.max(320, this.plot.clientWidth || 1000), height = TOP + LANE * LANES.length + 26;
    const x = (time) => LEFT + ((time - start) / (end - start || 1)) * (width - LEFT - 8);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `What the roles did from step ${data.first_step} to ${data.last_step}; a table is below` }, stripes());
    LANES.forEach((lane, index) => {
      svg.append(text(4, TOP + LANE * index + 22, lane, "lane"), s("line", { x1: LEFT, x2: width - 8, y1: TOP + LANE * index + 36, y2: TOP + LANE * index + 36, class: "rule" }));
    });
    for (const span of data.spans) {
      const left = x(span.start), wide = Math.max(0.6, x(span.end) - left);
      svg.append(s("rect", {
        x: left.toFixed(1), y: TOP + LANE * LANES.indexOf(span.role) + 6, width: wide.toFixed(1), height: 26, rx: wide > 6 ? 2 : 0,
        fill: span.waits_for ? `url(#waits-${span.waits_for})` : colour(span), class: "span",
      }, s("title", {}, `${span.role}, step ${span.step}: ${span.activity}${span.waits_for ? ` (from ${span.waits_for})` : ""}, ${duration(span.end - span.start)}`)));
    }
    stepMarks(data, x).forEach((mark) => svg.append(mark));
    for (const note of data.notes.filter((found) => ["commit", "restart", "serverdown", "serverup", "stop"].includes(found.event))) {
      svg.append(s("g", { class: `note ${note.event}` }, s("line", { x1: x(note.time), x2: x(note.time), y1: 8, y2: height - 22 }), s("title", {}, noteWords(note))));
    }
    svg.append(text(4, 16, "step"), text(4, height - 6, "time"));
    for (let index = 0; index <= 4; index += 1) svg.append(text(x(start + ((end - start) * index) / 4), height - 6, `+${duration(((end - start) * index) / 4)}`, index === 4 ? "end" : "tick"));
    fill(this.plot, svg, h("p", { class: "hint" }, `From ${clock(start)}, ${duration(end - start)}. Vertical lines: commits (green), restarts and lost servers (red).`));
    fill(this.shares, h("h2", {}, "Over the whole run"), shareBars(data.shares));
    fill(this.list, eventList(data.notes));
  }
}

function stepMarks(data, x) {
  const starts = data.spans.filter((span) => span.role === "trainer" && span.step);
  const marks = [];
  let drawn = -Infinity;
  for (const span of starts) {
    if (marks.at(-1)?.dataset.step === String(span.step)) continue;
    const at = x(span.start);
    if (at - drawn < 34) continue;
    drawn = at;
    const mark = text(at, 16, String(span.step), "step");
    mark.dataset.step = span.step;
    marks.push(mark);
  }
  return marks;
}

function shareBars(shares) {
  return LANES.filter((lane) => shares.some((share) => share.role === lane)).map((lane) => {
    const mine = shares.filter((share) => share.role === lane && share.fraction >= SEEN);
    return h("div", { class: "share" }, h("h3", {}, lane),
      h("div", { class: "bar" }, mine.map((share) => h("span", {
        class: share.waits_for ? `waits on-${share.waits_for}` : "", title: `${share.activity}: ${percent(share.fraction)}`,
        style: { flexGrow: share.fraction, background: share.waits_for ? null : colour(share) },
      }))),
      h("ul", {}, mine.map((share) => h("li", {}, h("b", {}, percent(share.fraction)), ` ${share.activity}`,
        share.waits_for ? h("em", {}, ` from ${share.waits_for}`) : null, h("small", {}, ` ${duration(share.seconds)}`)))));
  });
}

function eventList(notes) {
  if (!notes.length) return h("p", { class: "hint" }, "No event of these steps.");
  return h("details", {}, h("summary", {}, `${notes.length} events of these steps`), h("ol", {}, notes.slice(-400).map((note) => h("li", {}, `${clock(note.time)} ${noteWords(note)}`))));
}

function noteWords(note) {
  const parts = [WORDS[note.event] ?? note.event];
  if (note.version !== null) parts.push(`policy ${note.version}`);
  if (note.step !== null) parts.push(`step ${note.step}`);
  return [...parts, note.env, note.server, note.cause, note.reason].filter(Boolean).join(" ");
}

function colour(span) {
  return span.activity.startsWith("loads") ? "var(--green)" : COLOURS[span.activity] ?? "var(--grey)";
}

function stripes() {
  return s("defs", {}, ...AWAITED.map((role) => s("pattern", { id: `waits-${role}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { width: 2.6, height: 6, fill: `var(--on-${role})` }))));
}

function s(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function text(x, y, words, kind) {
  return s("text", { x, y, class: kind }, words);
}
