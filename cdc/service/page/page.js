"use strict";
// Everything shown comes from this daemon; names are set as text, never as markup.

const $ = (id) => document.getElementById(id);
const COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"];

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const number = (value) => Number(value || 0).toLocaleString("en");

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at && value < 10 ? 1 : 0)} ${units[at]}`;
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  const body = await answer.json();
  return { status: answer.status, body };
}

function stage(title, state, good, ...lines) {
  const box = make("div", { class: "stage" }, make("h3", {}, title), make("p", { class: good ? "good" : "bad" }, state));
  for (const [value, label] of lines) box.append(make("p", {}, make("strong", {}, value), ` ${label}`));
  return box;
}

function drawFlow(flow) {
  const stores = make("div", { class: "stores" });
  for (const sink of flow.sinks) {
    stores.append(stage(sink.name, sink.state, sink.state === "running",
      [sink.lag_bytes ? bytes(sink.lag_bytes) : "up to date", sink.lag_bytes ? "behind the log" : ""],
      [number(sink.changes), "changes applied"],
      [number(sink.dead_letters), "set aside"]));
  }
  const arrow = () => make("div", { class: "arrow", "aria-hidden": "true" }, "→");
  $("flow").replaceChildren(
    stage("Postgres", flow.capture, flow.capture === "streaming", [bytes(flow.slot_bytes), "of WAL kept for us"]),
    arrow(),
    stage("Log", flow.head, true, [number(flow.captured), "changes"]),
    arrow(),
    stores);
}

function drawReasons(reasons) {
  $("reasons").replaceChildren(...reasons.map((reason) =>
    make("li", {}, make("strong", {}, reason.part), `: ${reason.message} ${reason.remedy || ""}`)));
  const verdict = $("verdict");
  verdict.textContent = reasons.length ? "Not ready" : "Everything works";
  verdict.className = reasons.length ? "bad" : "good";
}

function drawTables(flow) {
  const sinks = flow.sinks.map((sink) => sink.name);
  const head = make("tr", {}, make("th", { scope: "col" }, "table"),
    ...sinks.map((name) => make("th", { scope: "col", class: "number" }, name)));
  const rows = Object.entries(flow.tables).sort().map(([table, counts]) =>
    make("tr", {}, make("th", { scope: "row" }, table),
      ...sinks.map((name) => make("td", { class: "number" }, number(counts[name])))));
  const table = $("tables");
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...rows);
}

function plot(svg, series) {
  const width = Math.max(200, svg.clientWidth), height = 150, pad = 4, bottom = 18;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const points = series.flatMap((one) => one.points);
  if (!points.length) { svg.replaceChildren(); return; }
  const last = Math.max(...points.map((point) => point[0]));
  const first = Math.min(last - 60, ...points.map((point) => point[0]));
  const top = Math.max(1, ...points.map((point) => point[1]));
  const x = (time) => pad + (time - first) / (last - first) * (width - 2 * pad);
  const y = (value) => height - bottom - value / top * (height - bottom - 16);
  const space = "http://www.w3.org/2000/svg";
  const drawn = series.map((one) => {
    const line = document.createElementNS(space, "polyline");
    line.setAttribute("points", one.points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" "));
    line.setAttribute("fill", "none");
    line.setAttribute("stroke", one.colour);
    line.setAttribute("stroke-width", "2");
    line.setAttribute("vector-effect", "non-scaling-stroke");
    return line;
  });
  const label = (text, left, at, anchor) => {
    const node = document.createElementNS(space, "text");
    node.setAttribute("x", left); node.setAttribute("y", at); node.setAttribute("text-anchor", anchor);
    node.textContent = text;
    return node;
  };
  svg.replaceChildren(...drawn, label(number(Math.round(top)), pad, 12, "start"),
    label(`${Math.round((last - first) / 60)} min ago`, pad, height - 4, "start"), label("now", width - pad, height - 4, "end"));
}

function drawPlots(history) {
  const names = history.sinks;
  const samples = history.samples;
  const rate = names.map((name, at) => ({
    colour: COLOURS[at % COLOURS.length],
    points: samples.slice(1).map((sample, place) => {
      const before = samples[place];
      const seconds = Math.max(0.001, sample.time - before.time);
      return [sample.time, Math.max(0, (sample.changes[at] - before.changes[at]) / seconds)];
    }),
  }));
  const lag = names.map((name, at) => ({
    colour: COLOURS[at % COLOURS.length],
    points: samples.map((sample) => [sample.time, sample.lag[at] / 1000]),
  }));
  plot($("plot-rate"), rate);
  plot($("plot-lag"), lag);
  $("legend").replaceChildren(...names.map((name, at) =>
    make("span", { style: `color:${COLOURS[at % COLOURS.length]}` }, `— ${name}`)));
}

async function refresh() {
  try {
    const [ready, flow, history] = await Promise.all([get("readyz"), get("v1/flow"), get("v1/history")]);
    drawReasons(ready.body.reasons);
    drawFlow(flow.body);
    drawTables(flow.body);
    drawPlots(history.body);
  } catch {
    $("verdict").textContent = "The daemon does not answer";
    $("verdict").className = "bad";
  }
}

$("why").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  const query = new URLSearchParams({ table: form.get("table"), key: form.get("key") });
  const { status, body } = await get(`v1/why?${query}`);
  const table = $("why-events");
  table.hidden = status !== 200 || !body.events.length;
  if (status !== 200) { $("why-answer").textContent = body.error; return; }
  $("why-answer").textContent = body.events.length
    ? `${body.events.length} event(s) in the log; ${body.sinks.map((sink) => `${sink.name}: ${sink.applied} applied`).join(", ")}.`
    : "The log holds no event of this key.";
  const columns = ["op", "version", "commit", "committed at", "transaction", "schema"];
  table.tHead.replaceChildren(make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name))));
  table.tBodies[0].replaceChildren(...body.events.map((one) =>
    make("tr", {}, ...[one.op, one.version, one.commit_lsn, one.commit_ts, one.xid, one.schema_id].map((cell) => make("td", {}, String(cell))))));
});

refresh();
setInterval(refresh, 2000);
