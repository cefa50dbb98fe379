// Why each token of a rollout was trained or not, and how much: the reasons always, the weights once `trivet explain` computed them.

import { h, table } from "./dom.js";
import { number } from "./format.js";

const COLOURS = { "trained": "transparent", "prompt": "#8884", "tool result": "#48f4", "later turn": "#48f2", "cut": "#f804", "filtered": "#c0c4", "off-policy mask": "#f004", "clipped": "#fa04" };

/** @param explained the server's answer for a rollout of a step */
export function explainView({ samples, loss, step_loss: stepLoss, missing }) {
  const counts = new Map();
  for (const sample of samples) {
    sample.reasons.forEach((reason, index) => {
      const row = counts.get(reason) ?? { tokens: 0, loss: 0, weight: 0 };
      row.tokens += 1;
      row.loss += sample.losses[index] ?? 0;
      row.weight += Math.abs(sample.weights[index] ?? 0);
      counts.set(reason, row);
    });
  }
  const largest = Math.max(...samples.flatMap((sample) => sample.weights.map((value) => Math.abs(value ?? 0))), 0);
  const rows = [...counts].map(([reason, row]) => [h("span", { style: { background: COLOURS[reason] } }, reason), number(row.tokens), ...(loss === null ? [] : [number(row.loss), number(row.weight)])]);
  return h("section", { class: "tokens", "aria-label": "Training of each token" }, h("h3", {}, "Training of each token"),
    loss === null ? null : h("p", { class: "hint" }, `The rollout adds ${number(loss)} to the step's loss of ${number(stepLoss)}. Green: the step raises the token's probability; red: it lowers it.`),
    missing ? h("p", { class: "hint" }, missing) : null,
    table(["reason", "tokens", ...(loss === null ? [] : ["share of the loss", "sum of |weight|"])], rows),
    samples.map((sample) => h("div", { class: "text" }, sample.token_ids.map((id, index) => mark(sample, index, largest)))));
}

function mark(sample, index, largest) {
  const reason = sample.reasons[index], weight = sample.weights[index] ?? null;
  const words = sample.texts ? sample.texts[index] : ` ${sample.token_ids[index]}`;
  const values = weight === null ? "" : `: ratio ${number(sample.ratios[index])}, share of the loss ${number(sample.losses[index])}, weight ${number(weight)}`;
  const isWeighted = reason === "trained" && weight !== null && largest > 0;
  const background = isWeighted ? `hsl(${weight < 0 ? 130 : 0} 80% 45% / ${(0.7 * Math.abs(weight) / largest).toFixed(3)})` : COLOURS[reason];
  return h("span", { title: `${reason}${values}`, style: { background } }, words === "" ? "\u200b" : words);
}
