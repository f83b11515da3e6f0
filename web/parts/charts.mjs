/** Two small charts, redrawn in their element's own pixels whenever it changes its size. */

import { figure, html, isNumber, svg } from "./dom.mjs";

const MARGIN = { left: 48, right: 8, top: 8, bottom: 18 };

/**
 * A chart that fills the element it is in.
 * draw(plot) gets {x(0…1), y(0…1), left, right, top, bottom}, in pixels, and returns the SVG elements.
 */
export class Chart {
  #draw = () => [];
  #observer;

  constructor() {
    this.svg = svg("svg", { "aria-hidden": "true" });
    this.element = html("div", "mixgrpo-chart", this.svg);
    this.#observer = new ResizeObserver(() => this.#redraw());
    this.#observer.observe(this.element);
  }

  show(draw) {
    this.#draw = draw;
    this.#redraw();
  }

  remove() {
    this.#observer.disconnect();
  }

  #redraw() {
    const [width, height] = [this.element.clientWidth, this.element.clientHeight];
    if (width < MARGIN.left + 20 || height < MARGIN.bottom + 20) return this.svg.replaceChildren();
    const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, height - MARGIN.bottom];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const x = (part) => left + part * (right - left);
    const y = (part) => bottom - part * (bottom - top);
    this.svg.replaceChildren(...this.#draw({ x, y, left, right, top, bottom }));
  }
}

/** Mean of each value and the ones before it, `span` at most; null where there is none. */
export function runningMean(values, span) {
  return values.map((_, last) => {
    const seen = values.slice(Math.max(0, last - span + 1), last + 1).filter(isNumber);
    return seen.length ? seen.reduce((sum, value) => sum + value, 0) / seen.length : null;
  });
}

/** The reward by iteration: as it came, thin, and its running mean, thick. iterations ascend; rewards may hold null. */
export function drawCurve(iterations, rewards) {
  return (plot) => {
    const known = rewards.filter(isNumber);
    if (!known.length) return [frame(plot), note(plot, "the reward appears here")];
    let [low, high] = [Math.min(...known), Math.max(...known)];
    if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
    const last = Math.max(iterations.at(-1), 2);
    const x = (iteration) => plot.x((iteration - 1) / (last - 1));
    const y = (value) => plot.y((value - low) / (high - low));
    const mean = runningMean(rewards, Math.max(3, Math.ceil(rewards.length / 8)));
    const middle = (plot.top + plot.bottom) / 2;
    return [
      frame(plot),
      label(plot.left - 5, plot.top, figure(high), "end", "middle"),
      label(plot.left - 5, plot.bottom, figure(low), "end", "middle"),
      svg("text", { transform: `translate(9 ${middle}) rotate(-90)`, "text-anchor": "middle" }, "reward"),
      label(plot.left, plot.bottom + 13, "1", "start"),
      label((plot.left + plot.right) / 2, plot.bottom + 13, "iteration", "middle"),
      label(plot.right, plot.bottom + 13, String(last), "end"),
      ...lines(iterations, rewards, x, y, "mixgrpo-raw"),
      ...lines(iterations, mean, x, y, "mixgrpo-mean"),
    ];
  };
}

/** The sigmas of a run by step from first on, with the stochastic window, [first step, number of steps], shaded. */
export function drawSigmas(sigmas, [start, size], first = 0) {
  return (plot) => {
    const steps = Math.max(1, sigmas.length - 1);
    const high = Math.max(...sigmas, 1e-9);
    const x = (step) => plot.x(step / steps);
    const shade = { class: "mixgrpo-window", x: x(start - first), y: plot.top, width: x(size) - x(0) };
    const indices = sigmas.map((_, index) => index);
    return [
      ...(size > 0 ? [svg("rect", { ...shade, height: plot.bottom - plot.top })] : []),
      frame(plot),
      label(plot.left - 5, plot.top, figure(high), "end", "middle"),
      label(plot.left - 5, plot.bottom, "0", "end", "middle"),
      svg("text", { transform: `translate(9 ${(plot.top + plot.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "sigma"),
      label(plot.left, plot.bottom + 13, String(first), "start"),
      label((plot.left + plot.right) / 2, plot.bottom + 13, "step", "middle"),
      label(plot.right, plot.bottom + 13, String(first + steps), "end"),
      ...lines(indices, sigmas, x, (value) => plot.y(value / high), "mixgrpo-mean"),
      ...indices.map((step) => svg("circle", { class: "mixgrpo-dot", cx: x(step), cy: plot.y(sigmas[step] / high), r: 1.8 })),
    ];
  };
}

function frame({ left, right, top, bottom }) {
  return svg("path", { class: "mixgrpo-axes", d: `M${left} ${top}V${bottom}H${right}` });
}

function note(plot, text) {
  return label((plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2, text, "middle", "middle");
}

function label(x, y, text, anchor, baseline = "auto") {
  return svg("text", { x, y, "text-anchor": anchor, "dominant-baseline": baseline }, text);
}

/** One line for every run of numbers; a number alone becomes a dot. */
function lines(xs, ys, x, y, name) {
  const runs = [[]];
  ys.forEach((value, index) => (isNumber(value) ? runs.at(-1).push([x(xs[index]), y(value)]) : runs.push([])));
  return runs.filter((run) => run.length).map((run) =>
    run.length === 1
      ? svg("circle", { class: "mixgrpo-dot", cx: run[0][0], cy: run[0][1], r: 2 })
      : svg("polyline", { class: name, points: run.map((point) => point.map((value) => value.toFixed(1)).join(",")).join(" ") }),
  );
}
