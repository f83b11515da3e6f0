/** What is known of one training job, kept up to date by events, by the node's result, and by asking. No DOM. */

import { isNumber } from "./dom.mjs";

const GOING_ON = new Set(["queued", "running", "pausing", "cancelling"]);
const POLL = 2000; // milliseconds
const PATIENCE = 10000; // between questions while the backend does not answer
const SAVED = /^(.{1,64})\/([0-9a-f]{16})$/;

export class Job {
  #fetch;
  #changed;
  #timer = null;
  #asked = 0;
  #removed = false;

  /** fetch is `api.fetchApi`; changed() is called whenever there is something new to show. */
  constructor(fetch, changed) {
    [this.#fetch, this.#changed] = [fetch, changed];
    this.#reset("", "");
  }

  #reset(backend, id) {
    this.#stop();
    Object.assign(this, { backend, id, name: "", state: "", iteration: 0, iterations: 0, reward: null, best: null, loras: [] });
    Object.assign(this, { seconds: null, secondsLeft: null, error: "", problem: "", lora: "", loraIteration: 0 });
    this.curve = new Map(); // iteration -> reward or null
  }

  /** True while the job goes on by itself. */
  get goingOn() {
    return GOING_ON.has(this.state);
  }

  /** True while it may be paused or cancelled. */
  get stoppable() {
    return this.state === "queued" || this.state === "running";
  }

  /** What a workflow remembers: the backend's name and the job's id, and nothing else. */
  get saved() {
    return this.id ? `${this.backend}/${this.id}` : "";
  }

  /** Take up a job that a workflow remembers, and the LoRA file of its last result. */
  restore(saved, lora) {
    const [, backend, id] = SAVED.exec(saved) ?? [];
    if (!id || (backend === this.backend && id === this.id)) return;
    this.#reset(backend, id);
    this.#setLora(typeof lora === "string" ? lora : "");
    this.#poll();
  }

  /** A `mixgrpo.progress` event. */
  progress(event) {
    const resumed = event.backend !== this.backend || event.job !== this.id;
    if (resumed) this.#reset(event.backend, event.job);
    const { state, iteration, iterations } = event;
    Object.assign(this, { state, iteration, iterations, problem: "", error: "", secondsLeft: event.seconds_left ?? null });
    for (const [reached, reward] of event.reached ?? []) this.curve.set(reached, reward);
    this.#setReward(event.reward);
    // the first event of a continued job, and the last one, leave a curve to be fetched
    this.#askIn((resumed && iteration > 0) || !this.goingOn ? 0 : 2 * POLL);
    this.#changed();
  }

  /** The summary that the node ends with. */
  result(summary) {
    if (summary.backend !== this.backend || summary.job !== this.id) this.#reset(summary.backend, summary.job);
    this.#take(summary);
    if (summary.lora) this.#setLora(summary.lora, summary.lora_iteration);
    this.#askIn(this.goingOn ? POLL : null);
    this.#changed();
  }

  /** Ask the backend to "pause" or "cancel" the job. */
  async ask(what) {
    const { backend, id } = this;
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" };
    const { answer, problem } = await this.#request(`/${what}`, options);
    if (backend !== this.backend || id !== this.id) return;
    this.problem = problem;
    if (answer) this.state = answer.state;
    this.#askIn(this.goingOn ? POLL : 0);
    this.#changed();
  }

  /** Ask nothing any more, whatever answers are still on their way: the node is gone. */
  remove() {
    this.#removed = true;
    this.#stop();
  }

  #stop() {
    this.#asked += 1; // an answer on its way is another job's
    this.#askIn(null);
  }

  #take(summary) {
    const { name, state, iteration, iterations, seconds } = summary;
    Object.assign(this, { name, state, iteration, iterations, seconds, best: summary.best ?? null, problem: "" });
    this.loras = summary.loras ?? this.loras;
    this.secondsLeft = summary.seconds_left ?? null;
    this.error = summary.error ?? "";
    const { iteration: reached, reward } = summary.curve;
    this.curve = new Map(reached.map((number, index) => [number, reward[index]]));
    this.#setReward([...this.curve.values()].findLast(isNumber));
  }

  #setReward(value) {
    if (isNumber(value)) this.reward = value;
  }

  #setLora(name, iteration) {
    this.lora = name;
    this.loraIteration = iteration ?? Number(/_(\d+)\.safetensors$/.exec(name)?.[1] ?? 0);
  }

  #askIn(milliseconds) {
    clearTimeout(this.#timer);
    this.#timer = milliseconds === null || this.#removed ? null : setTimeout(() => this.#poll(), milliseconds);
  }

  async #poll() {
    const question = ++this.#asked;
    const { answer, problem, status } = await this.#request("/summary");
    if (question !== this.#asked) return;
    if (answer) this.#take(answer);
    else if (status === 404) this.#reset("", ""); // the workflow comes from another machine, or the folder of jobs does
    else this.problem = problem;
    if (this.goingOn) this.#askIn(problem ? PATIENCE : POLL);
    this.#changed();
  }

  /** {answer} or {problem, status}; the sentence of a refusal is ComfyUI's or the backend's own. */
  async #request(path, options) {
    try {
      const response = await this.#fetch(`/mixgrpo/${encodeURIComponent(this.backend)}/jobs/${this.id}${path}`, options);
      const body = await response.json();
      return response.ok ? { answer: body } : { problem: body.error.message, status: response.status };
    } catch (error) {
      return { problem: `ComfyUI does not answer (${error.message})` };
    }
  }
}
