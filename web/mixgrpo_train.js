/** The display of GRPO Train Step: how its job goes, with buttons to pause and cancel it. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addDisplay, chain, isFirst, loadStyle } from "./parts/display.mjs";
import { Job } from "./parts/job.mjs";
import { TrainingView } from "./parts/training_view.mjs";

const NAME = "mixgrpo.trainStep";
const NODE = "MixGRPO_TrainStep";
const jobs = new WeakMap(); // node -> Job

function addTraining(node) {
  let view = null;
  const job = new Job(
    (path, options) => api.fetchApi(path, options),
    () => {
      view.show();
      if (job.saved) Object.assign(node.properties, { mixgrpo_job: job.saved, mixgrpo_lora: job.lora });
      node.setDirtyCanvas(true, false);
    },
  );
  const removed = () => {
    job.remove();
    view.remove();
  };
  const element = addDisplay(app, node, "mixgrpo_training", () => view?.minHeight ?? 44, removed);
  view = new TrainingView(element, job);
  jobs.set(node, job);
  chain(node, "onConfigure", () => job.restore(node.properties.mixgrpo_job ?? "", node.properties.mixgrpo_lora));
  chain(node, "onExecuted", (output) => {
    const summary = output?.mixgrpo_train?.at(-1);
    if (!summary) return;
    const isNew = summary.lora && summary.lora !== job.lora;
    job.result(summary);
    if (isNew) app.refreshComboInNodes(); // so that loaders offer the file
  });
}

/** The node of an execution id, which names the nodes from the outermost subgraph inwards: "12" or "12:3". */
function findNode(id) {
  let [graph, node] = [app.graph, null];
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(Number(part)) ?? null;
    graph = node?.subgraph;
  }
  return node;
}

/** Have the page's draft of the workflow hold the job before the page goes: it is written when the user changes something. */
function saveDraft() {
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.();
}

if (isFirst(app, NAME)) {
  app.registerExtension({
    name: NAME,
    setup() {
      loadStyle();
      window.addEventListener("pagehide", saveDraft);
      api.addEventListener("mixgrpo.progress", ({ detail }) => jobs.get(findNode(detail.node))?.progress(detail));
    },
    nodeCreated(node) {
      if (node.comfyClass === NODE) addTraining(node);
    },
  });
}
