// The tokens of a sample in colour: by how likely each was, or by the policy that sampled it.

import { fill, h } from "./dom.js";
import { number, percent } from "./format.js";
import { COLOURS } from "./chart.js";

const PIECE = 4000; // tokens drawn at once; the rest on request, so that a long context does not stop the page

/** @param samples the columns that the server gives for each sample of a rollout */
export function tokenView(samples) {
  const body = h("div", {});
  const draw = (by) => fill(body, samples.map((sample, index) => sampleView(sample, { by, title: samples.length > 1 ? `Sample ${index + 1} of ${samples.length}` : "" })));
  const pick = (by, words) => h("label", {}, h("input", { type: "radio", name: "colour", checked: by === "probability", onchange: () => draw(by) }), words);
  draw("probability");
  return h("section", { class: "tokens" }, h("h3", {}, "Tokens"),
    h("div", { class: "tools" }, pick("probability", "by probability"), pick("version", "by policy version"), pick("none", "plain")), body);
}

function sampleView(sample, { by, title }) {
  const versions = [...new Set(sample.versions.filter((version) => version !== null))].sort((one, other) => one - other);
  const sampled = sample.sampler_logprobs.filter((value) => value !== null);
  const mean = sampled.reduce((sum, value) => sum + value, 0) / (sampled.length || 1);
  const line = h("div", { class: "text" });
  let drawn = 0;
  const more = h("button", { type: "button", onclick: () => extend() }, "Show more");
  const extend = () => {
    const end = Math.min(sample.token_ids.length, drawn + PIECE);
    for (; drawn < end; drawn += 1) line.append(tokenMark(sample, drawn, { by, versions }));
    more.hidden = drawn >= sample.token_ids.length;
  };
  extend();
  return h("div", { class: "sample" }, title ? h("h4", {}, title) : null,
    h("p", { class: "hint" }, `${number(sample.token_ids.length)} tokens, ${number(sampled.length)} of them sampled by ${versions.length === 1 ? `policy ${versions[0]}` : `policies ${versions.join(", ")}`}; `,
      `mean log-probability ${number(mean)}.`, sample.reasons.includes("filtered") ? " A filter masked the sample from the loss." : "", sample.texts ? "" : " The run has no tokenizer any more: ids are shown."),
    legend(by, versions), line, more);
}

function tokenMark(sample, index, { by, versions }) {
  const logprob = sample.sampler_logprobs[index], version = sample.versions[index];
  const words = sample.texts ? sample.texts[index] : ` ${sample.token_ids[index]}`;
  if (logprob === null) return h("span", { class: "read", title: `token ${sample.token_ids[index]}, read, not sampled` }, words);
  const title = `token ${sample.token_ids[index]}: p = ${percent(Math.exp(logprob))}, log-probability ${number(logprob)}, policy ${version}`;
  const background = by === "probability" ? probabilityColour(Math.exp(logprob)) : by === "version" ? `${COLOURS[versions.indexOf(version) % COLOURS.length]}55` : "transparent";
  return h("span", { class: "sampled", title, style: { background } }, words === "" ? "\u200b" : words);
}

/** From red for what was unlikely, over yellow, to none for what was sure. */
export function probabilityColour(probability) {
  return `hsl(${Math.round(55 * probability)} 90% 55% / ${(0.65 * (1 - probability)).toFixed(2)})`;
}

function legend(by, versions) {
  if (by === "probability") return h("p", { class: "legend" }, [1, 0.75, 0.5, 0.25, 0.05].map((value) => h("span", { style: { background: probabilityColour(value) } }, percent(value))));
  if (by === "version") return h("p", { class: "legend" }, versions.map((version, index) => h("span", { style: { background: `${COLOURS[index % COLOURS.length]}55` } }, `policy ${version}`)));
  return null;
}
