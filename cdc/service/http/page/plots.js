"use strict";
// Lines over the last hour, drawn as SVG; each plot's aria-label has its newest values for screen readers.

const SPACE = "http://www.w3.org/2000/svg";
const COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"];
const HEIGHT = 140, PAD = 4, BOTTOM = 18, TOP = 16;

function shape(tag, attributes, text) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const short = (value) => value >= 1000 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(0) : value.toFixed(1);

function plot(id, series) {
  const svg = document.getElementById(id);
  const width = Math.max(200, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-label", described(series));
  const points = series.flatMap((one) => one.points.filter((point) => point[1] !== null));
  if (!points.length) { svg.replaceChildren(shape("text", { x: PAD, y: HEIGHT / 2 }, "no data yet")); return; }
  const last = Math.max(...points.map((point) => point[0]));
  const first = Math.min(last - 60, ...points.map((point) => point[0]));
  const top = Math.max(1, ...points.map((point) => point[1]));
  const x = (time) => PAD + (time - first) / (last - first) * (width - 2 * PAD);
  const y = (value) => HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP);
  const grid = [0, top].map((value) => shape("line", { class: "grid", x1: PAD, x2: width - PAD, y1: y(value), y2: y(value) }));
  const minutes = Math.round((last - first) / 60);
  svg.replaceChildren(...grid, ...series.map((one) => line(one, x, y)),
    shape("text", { x: PAD, y: 12 }, short(top)),
    shape("text", { x: PAD, y: HEIGHT - 4 }, `${minutes} min ago`),
    shape("text", { x: width - PAD, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
}

function line(one, x, y) {
  let path = "", drawing = false;
  for (const [time, value] of one.points) {
    if (value === null) { drawing = false; continue; }
    path += `${drawing ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!drawing) path += "h.01";
    drawing = true;
  }
  return shape("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round" });
}

function described(series) {
  const texts = series.map((one) => {
    const known = one.points.filter((point) => point[1] !== null);
    return known.length ? `${one.name}: ${short(known[known.length - 1][1])} now, at most ${short(Math.max(...known.map((point) => point[1])))}` : `${one.name}: no data yet`;
  });
  return texts.join("; ");
}

function drawPlots(history) {
  const samples = history.samples;
  const perSink = (value) => history.sinks.map((name, at) => ({
    name, colour: COLOURS[at % COLOURS.length],
    points: samples.map((sample, index) => [sample.time, value(sample, sample.sinks.indexOf(name), samples[index - 1])]),
  }));
  const rate = (sample, at, before) => {
    if (!before || at < 0 || before.changes[at] === undefined) return null;
    return Math.max(0, (sample.changes[at] - before.changes[at]) / Math.max(0.001, sample.time - before.time));
  };
  plot("plot-rate", perSink(rate));
  plot("plot-slow", perSink((sample, at) => at < 0 ? null : sample.slow[at]));
  plot("plot-lag", perSink((sample, at) => at < 0 ? null : sample.seconds[at]));
  plot("plot-slot", [{ name: "slot", colour: "var(--quiet)", points: samples.map((sample) => [sample.time, sample.slot_bytes / 1e6]) }]);
  const legend = document.getElementById("legend");
  legend.replaceChildren(...history.sinks.map((name, at) => {
    const entry = document.createElement("span");
    entry.className = `series-${at % COLOURS.length}`;
    const mark = document.createElement("b");
    mark.textContent = "— ";
    entry.append(mark, name);
    return entry;
  }));
}
