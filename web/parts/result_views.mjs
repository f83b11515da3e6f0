/** Tables of scores and of compared samplers, and the steps of a sampler run. */

import { Chart, drawSigmas } from "./charts.mjs";
import { figure, html, isNumber } from "./dom.mjs";

export class ScoresView {
  #rows = 0;

  constructor(element) {
    this.table = html("table");
    this.frame = html("div", "mixgrpo-scroll", this.table);
    this.frame.hidden = true;
    element.append(this.frame);
  }

  get minHeight() {
    return this.#rows ? 48 + 18 * Math.min(this.#rows, 6) : 0;
  }

  /** rows are {image, score, and each reward by its name}, best first; null where a picture could not be scored. */
  show(rows) {
    this.#rows = rows.length;
    this.frame.hidden = false;
    const { image, score, ...rewards } = rows[0];
    const names = Object.keys(rewards);
    const head = ["image", "score", ...names].map((name) => html("th", "", name.replaceAll("_", " ")));
    const body = rows.map((row) => html("tr", "", ...[row.image, row.score, ...names.map((name) => row[name])].map(cell)));
    this.table.replaceChildren(html("thead", "", html("tr", "", ...head)), html("tbody", "", ...body));
  }

  remove() {}
}

function cell(value, column) {
  return html("td", "", column === 0 ? String(value) : figure(value));
}

const MEASURED = [
  ["NFE", "nfe"],
  ["rows", "rows"],
  ["seconds", "seconds"],
  ["RMSE", "rmse"],
  ["diversity", "diversity"],
  ["reward", "reward_mean"],
  ["to first", "difference_mean"],
];

export class CompareView {
  #rows = 0;

  constructor(element) {
    this.table = html("table", "mixgrpo-compared");
    this.frame = html("div", "mixgrpo-scroll", this.table);
    this.frame.hidden = true;
    element.append(this.frame);
  }

  get minHeight() {
    return this.#rows ? 30 + 18 * Math.min(this.#rows, 8) : 0;
  }

  /** rows are the table of a comparison, one a sampler; what none of them has is left out. */
  show(rows) {
    this.#rows = rows.length;
    this.frame.hidden = false;
    const columns = MEASURED.filter(([, name]) => rows.some((row) => isNumber(row[name])));
    const head = ["sampler", ...columns.map(([title]) => title)].map((title) => html("th", "", title));
    const body = rows.map((row) => html("tr", "", named(row), ...columns.map(([, name]) => measured(row, name))));
    this.table.replaceChildren(html("thead", "", html("tr", "", ...head)), html("tbody", "", ...body));
  }

  remove() {}
}

function named(row) {
  const shown = html("td", "", row.label);
  shown.title = row.sampler;
  return shown;
}

/** Whole counts as they are, and what has an interval with its half width. */
function measured(row, name) {
  const value = row[name];
  const counted = name === "nfe" || name === "rows";
  const shown = html("td", "", counted && Number.isInteger(value) ? String(value) : figure(value));
  const high = row[name.replace("_mean", "_high")];
  if (name.endsWith("_mean") && isNumber(high)) {
    shown.append(` ± ${figure(high - value)}`);
    shown.title = `95 %: ${figure(row[name.replace("_mean", "_low")])} to ${figure(high)}`;
  }
  return shown;
}

export class SamplerView {
  #chart = new Chart();
  #shown = false;

  constructor(element) {
    this.line = html("div", "mixgrpo-status mixgrpo-wrap");
    this.unseen = html("div", "mixgrpo-status mixgrpo-wrap");
    element.append(this.line, this.unseen, this.#chart.element);
    for (const part of [this.line, this.unseen, this.#chart.element]) part.hidden = true;
  }

  get minHeight() {
    return this.#shown ? 145 + (this.unseen.hidden ? 0 : 32) : 0;
  }

  /** runs are {sigmas, window, std, log_probs, steps, nfe, rows, shared_prefix, unseen, …}; the last one is shown. */
  show(runs) {
    const { sigmas, window, std, log_probs: logProbs, steps, nfe, rows, shared_prefix: prefix, unseen } = runs.at(-1);
    const [start, size] = window;
    const words = [`${steps.length} steps`, `${nfe} calls, ${rows} rows`];
    if (!["used", "not shared"].includes(prefix)) words.push(`start not shared: ${prefix}`);
    if (size && std.length) {
      words.push(size === 1 ? `stochastic: ${start}` : `stochastic: ${start}–${start + size - 1}`);
      words.push(`std ${std.length === 1 ? figure(std[0]) : `${figure(std[0])}–${figure(std.at(-1))}`}`);
      const known = logProbs.flat().filter(isNumber);
      if (known.length) words.push(`log p ${figure(known.reduce((sum, value) => sum + value, 0) / known.length)}`);
    } else words.push(`no noise: ${[...new Set(steps.map((step) => step.method))].join(", ")}`);
    this.line.textContent = words.join(" · ");
    this.line.title = logProbs.map((row, step) => `step ${start + step}: std ${figure(std[step])}`).join("\n");
    this.unseen.textContent = unseen.length ? `A trainer would not see ${unseen.join(", ")}` : "";
    this.#shown = true;
    for (const part of [this.line, this.#chart.element]) part.hidden = false;
    this.unseen.hidden = !unseen.length;
    this.#chart.show(drawSigmas(sigmas, std.length ? window : [start, 0], steps[0].step));
  }

  remove() {
    this.#chart.remove();
  }
}
