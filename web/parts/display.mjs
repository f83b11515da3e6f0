/** A display at the lower end of a node: a DOM widget that nothing is saved of and that no prompt carries. */

import { html } from "./dom.mjs";

/** Load the style sheet once for a page; a second copy of this pack finds the first one's. */
export function loadStyle() {
  if (document.querySelector("link[data-mixgrpo]")) return;
  const link = html("link");
  link.rel = "stylesheet";
  link.href = new URL("../mixgrpo.css", import.meta.url).href;
  link.dataset.mixgrpo = "";
  document.head.append(link);
}

/**
 * Append a display to a node and return its element.
 * minHeight() gives its least height in pixels; removed() is called when the node goes.
 */
export function addDisplay(app, node, type, minHeight, removed) {
  const element = html("div", "mixgrpo");
  const widget = node.addDOMWidget(type, type, element, { serialize: false, getMinHeight: minHeight });
  widget.serialize = false; // the option keeps it out of prompts, this keeps it out of saved workflows
  element.addEventListener("wheel", (event) => forwardWheel(app, event), { passive: false });
  chain(node, "onRemoved", removed);
  return element;
}

/** Call `also` with the same arguments after what a node's hook does already. */
export function chain(node, hook, also) {
  const before = node[hook];
  node[hook] = function (...given) {
    const result = before?.apply(this, given);
    also.apply(this, given);
    return result;
  };
}

/** True when this copy of the pack is the one that registers an extension of that name. */
export function isFirst(app, name) {
  return !app.extensions.some((extension) => extension.name === name);
}

/** The wheel zooms the canvas over a display as it does beside it, except where there is something to scroll. */
function forwardWheel(app, event) {
  const scrolls = event.target.closest?.(".mixgrpo-scroll");
  if (scrolls && scrolls.scrollHeight > scrolls.clientHeight && !event.ctrlKey) return event.stopPropagation();
  event.preventDefault();
  event.stopPropagation();
  app.canvas?.processMouseWheel?.(event);
}
