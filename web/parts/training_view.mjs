/** How a training job looks on its node. */

import { Chart, drawCurve } from "./charts.mjs";
import { duration, figure, html, isNumber } from "./dom.mjs";

const WORDS = {
  queued: "waiting in the queue",
  running: "training",
  pausing: "pausing",
  cancelling: "cancelling",
  paused: "paused",
  cancelled: "cancelled",
  failed: "failed",
  done: "done",
};
const TIPS = {
  pause: "Saves a checkpoint and stops; run the node again to continue",
  cancel: "Stops without saving; checkpoints and LoRAs made so far stay",
};

export class TrainingView {
  #job;
  #chart = new Chart();

  /** Fill `element` with what `job` knows; call `show` whenever it knows more. */
  constructor(element, job) {
    this.#job = job;
    this.fill = html("div", "mixgrpo-fill");
    this.count = html("span", "mixgrpo-count");
    this.status = html("div", "mixgrpo-status");
    this.lora = html("button", "mixgrpo-lora");
    this.lora.title = "Click to copy the LoRA's file name";
    this.lora.addEventListener("click", () => this.#copy());
    this.buttons = { pause: this.#button("pause", "Pause"), cancel: this.#button("cancel", "Cancel") };
    this.bar = html("div", "mixgrpo-bar", html("div", "mixgrpo-track", this.fill), this.count);
    this.bar.setAttribute("role", "progressbar");
    this.actions = html("div", "mixgrpo-actions", this.lora, this.buttons.pause, this.buttons.cancel);
    element.append(this.bar, this.status, this.#chart.element, this.actions);
    this.show();
  }

  /** Pixels that the view needs: a line before the first run, all of it afterwards. */
  get minHeight() {
    return this.#job.id ? 190 : 44;
  }

  show() {
    const job = this.#job;
    const part = job.iterations ? Math.min(1, job.iteration / job.iterations) : 0;
    this.fill.style.width = `${100 * part}%`;
    this.fill.dataset.state = job.state;
    this.count.textContent = job.iterations ? `${job.iteration} / ${job.iterations}` : "";
    this.bar.setAttribute("aria-valuenow", String(Math.round(100 * part)));
    this.#showStatus();
    for (const button of Object.values(this.buttons)) button.disabled = !job.stoppable;
    for (const part of [this.bar, this.#chart.element, this.actions]) part.hidden = !job.id;
    const iterations = [...job.curve.keys()].sort((one, other) => one - other);
    this.#chart.show(drawCurve(iterations, iterations.map((number) => job.curve.get(number))));
    this.#showLora();
  }

  remove() {
    this.#chart.remove();
  }

  #showStatus() {
    const job = this.#job;
    const words = [WORDS[job.state] ?? job.state];
    if (isNumber(job.reward)) words.push(`reward ${figure(job.reward)}`);
    if (job.goingOn && isNumber(job.secondsLeft)) words.push(`${duration(job.secondsLeft)} left`);
    if (!job.goingOn && isNumber(job.seconds)) words.push(`took ${duration(job.seconds)}`);
    const trouble = job.problem || job.error;
    this.status.textContent = trouble || (job.id ? words.filter(Boolean).join(" · ") : "Nothing trained yet: run this node");
    this.status.title = trouble || (job.id ? `job ${job.id} on ${job.backend}` : "");
    this.status.classList.toggle("mixgrpo-trouble", Boolean(trouble));
  }

  #showLora() {
    const job = this.#job;
    const newest = Math.max(0, ...job.loras);
    const newer = !job.goingOn && newest > job.loraIteration ? `LoRA of iteration ${newest}: run again to fetch it` : "";
    const name = job.lora.split(/[\\/]/).at(-1);
    this.lora.textContent = newer || name;
    this.lora.disabled = Boolean(newer) || !name;
  }

  #button(what, label) {
    const button = html("button", "mixgrpo-button", label);
    button.title = TIPS[what];
    button.addEventListener("click", () => {
      button.disabled = true; // until the answer says what became of it
      this.#job.ask(what);
    });
    return button;
  }

  async #copy() {
    const name = this.lora.textContent;
    try {
      await navigator.clipboard.writeText(this.#job.lora);
      this.lora.textContent = "copied";
    } catch {
      this.lora.textContent = "the browser does not let a page copy here"; // http and another machine
    }
    setTimeout(() => {
      if (this.#job.lora.endsWith(name)) this.#showLora();
    }, 1200);
  }
}
