/** What Score Images, MixGRPO Sampler and Compare Samplers have found, on the nodes themselves. */

import { app } from "../../scripts/app.js";
import { addDisplay, chain, isFirst, loadStyle } from "./parts/display.mjs";
import { CompareView, SamplerView, ScoresView } from "./parts/result_views.mjs";

const NAME = "mixgrpo.results";
const VIEWS = {
  MixGRPO_ScoreImages: { type: "mixgrpo_scores", View: ScoresView },
  MixGRPO_Sampler: { type: "mixgrpo_sampler", View: SamplerView },
  MixGRPO_CompareSamplers: { type: "mixgrpo_compare", View: CompareView },
};
const views = new WeakMap(); // node -> function that shows an output

function addResult(node, { type, View }) {
  let view = null;
  const element = addDisplay(app, node, type, () => view?.minHeight ?? 0, () => view.remove());
  view = new View(element);
  const show = (output) => {
    if (!output?.[type]?.length) return;
    view.show(output[type]);
    node.setDirtyCanvas(true, false);
  };
  views.set(node, show);
  chain(node, "onExecuted", show);
}

if (isFirst(app, NAME)) {
  app.registerExtension({
    name: NAME,
    setup: loadStyle,
    nodeCreated(node) {
      const kind = VIEWS[node.comfyClass];
      if (kind) addResult(node, kind);
    },
    /** Outputs that the page knows already: of a workflow loaded from the queue's history. */
    onNodeOutputsUpdated(outputs) {
      for (const node of app.graph.nodes) views.get(node)?.(outputs[node.id]);
    },
  });
}
