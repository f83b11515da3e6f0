/** Builds DOM and SVG from data. Data becomes text or an attribute's value, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with a class and children, which are elements or texts. */
export function html(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** True for a number that can be drawn; JSON has null for what could not be measured. */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with three significant digits, "–" for anything else. */
export function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(1).replace("-", "−");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3).replace("-", "−");
}

/** Seconds as a user reads them: "40 s", "3 min", "2 h 5 min". */
export function duration(seconds) {
  if (seconds < 59.5) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
}
