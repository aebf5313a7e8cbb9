"use strict";
// Everything shown comes from this daemon; names are set as text, never as markup.

const $ = (id) => document.getElementById(id);
const OPS = { c: "inserted", u: "updated", d: "deleted", r: "read", t: "truncated", m: "messages" };
let token = sessionStorage.getItem("millrace-token") || "";

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Replace a node's children; a focused button keeps the focus. */
function refill(node, ...children) {
  const at = node.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  node.replaceChildren(...children);
  if (at) node.querySelector(`[data-id="${CSS.escape(at)}"]`)?.focus();
}

const number = (value) => Number(value || 0).toLocaleString("en");

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at && value < 10 ? 1 : 0)} ${units[at]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? Number(seconds).toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

class NeedsToken extends Error {}

async function ask(path, options) {
  const headers = { ...(token ? { authorization: `Bearer ${token}` } : {}), ...(options?.headers || {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (answer.status === 401) throw new NeedsToken();
  return { status: answer.status, body: await answer.json() };
}

const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

// -- the flow

function stage(title, state, kind, extra, ...lines) {
  const head = make("h3", {}, title, make("span", { class: kind }, state), ...extra);
  const box = make("div", { class: `stage ${kind}-edge` }, head);
  for (const [value, label, colour] of lines) box.append(make("p", colour ? { class: colour } : {}, make("strong", {}, value), ` ${label}`));
  return box;
}

function arrow(rate, blocked) {
  const kind = blocked ? "blocked" : rate > 0 ? "moving" : "";
  return make("div", { class: `arrow ${kind}` }, `${number(Math.round(rate))}/s`, make("i", { "aria-hidden": "true" }),
    blocked || "");
}

function sinkKind(sink) {
  if (sink.state === "running") return sink.lag_seconds > 30 || Object.keys({ ...sink.waiting, ...sink.lost }).length ? "slow" : "good";
  return sink.state === "paused" || sink.state === "starting" ? "slow" : "bad";
}

function pauseButton(target, paused) {
  const verb = paused ? "resume" : "pause";
  const button = make("button", { type: "button", "data-id": `pause ${target}`, "aria-label": `${verb} ${target}` }, verb);
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled")) return;
    button.setAttribute("aria-disabled", "true"); // a disabled button would lose the focus
    try { await post(`v1/${verb}`, { target }); } finally { await refresh(); }
  });
  return button;
}

function storeBox(sink) {
  const behind = sink.lag_seconds > 0.5 || sink.lag_bytes > 0;
  const lost = Object.keys(sink.lost);
  const initial = lost.length ? "its lost tables" : "the first snapshot";
  const lacks = sink.reached === "0/0" ? initial : `${bytes(sink.lag_bytes)} of WAL`;
  const lines = [[behind ? duration(sink.lag_seconds) : "up to date", behind ? `behind, ${lacks}` : "", behind && sink.lag_seconds > 30 ? "slow" : ""],
    [number(sink.changes), `changes applied, last batch ${duration(sink.batch_ms / 1000)}`]];
  if (sink.dead_letters) lines.push([number(sink.dead_letters), "dead letter(s)", "bad"]);
  if (sink.held.length) lines.push([sink.held.join(", "), "paused", "slow"]);
  const waiting = Object.keys(sink.waiting);
  if (waiting.length) lines.push([waiting.join(", "), "waiting", "bad"]);
  if (lost.length) lines.push([lost.join(", "), "lost", "bad"]);
  if (sink.skipped.length) lines.push([sink.skipped.join(", "), "skipped", "slow"]);
  return stage(sink.name, sink.state, sinkKind(sink), [pauseButton(sink.name, sink.state === "paused")], ...lines);
}

function slotLines(slot) {
  const lines = [[bytes(slot.bytes), "of WAL kept for the slot"]];
  if (slot.room !== null) lines.push([bytes(slot.room), "more until the slot is lost", slot.seconds_to_full !== null ? "slow" : ""]);
  if (slot.seconds_to_full !== null) lines.push([duration(slot.seconds_to_full), "until then, at this rate", "bad"]);
  return lines;
}

let applied = null;

function appliedRate(flow) {
  const now = performance.now() / 1000, total = flow.sinks.reduce((sum, sink) => sum + sink.changes, 0);
  const rate = applied ? Math.max(0, (total - applied.total) / Math.max(0.1, now - applied.at)) : 0;
  applied = { at: now, total };
  return rate;
}

function drawFlow(flow) {
  const good = flow.capture === "streaming";
  const kind = good ? "good" : flow.capture === "snapshot" || flow.capture === "starting" ? "slow" : "bad";
  const waiting = flow.sinks.filter((sink) => sink.state === "waiting").map((sink) => sink.name);
  const log = [[number(flow.captured), "changes since the start"], [bytes(flow.disk_free), "free on its disk"]];
  if (flow.disk_seconds_to_full !== null && flow.disk_seconds_to_full < 21600) log.push([duration(flow.disk_seconds_to_full), "until the disk is full", "bad"]);
  refill($("flow"),
    stage("Postgres", flow.capture, kind, [], ...slotLines(flow.slot), ...(flow.trouble ? [["", flow.trouble, "bad"]] : [])),
    arrow(flow.per_second, flow.queued_bytes > 1e6 ? `${bytes(flow.queued_bytes)} not yet in the log` : ""),
    stage("Log", flow.head, "good", [], ...log),
    arrow(appliedRate(flow), waiting.length ? `${waiting.join(", ")} waiting` : ""),
    make("div", { class: "stores" }, ...flow.sinks.map(storeBox)));
}

function drawReasons(reasons, sinks) {
  $("reasons").replaceChildren(...reasons.map((reason) =>
    make("li", {}, make("strong", {}, reason.part), `: ${reason.message} ${reason.remedy || ""}`)));
  const late = sinks.filter((sink) => sink.lag_seconds > 60).map((sink) => `${sink.name} is ${duration(sink.lag_seconds)} behind`);
  if (reasons.length) showVerdict("Not ready", "bad");
  else showVerdict(["Everything works", ...late].join("; "), late.length ? "slow" : "good");
}

function showVerdict(text, kind) {
  const verdict = $("verdict");
  if (verdict.textContent !== text) verdict.textContent = text;
  verdict.className = kind;
}

// -- waiting tables, snapshots, tables, dead letters

function drawWaiting(flow) {
  const rows = Object.entries(flow.waiting).map(([table, why]) => waitingRow("capture", table, "not followed", why, []));
  for (const sink of flow.sinks) {
    for (const [table, why] of Object.entries(sink.waiting)) {
      const since = `waiting since ${String(why.since || "").slice(11, 19)}, tried ${number(why.tries)} time(s)`;
      rows.push(waitingRow(sink.name, table, since, why, [tableButton("resume", "retry", table, sink.name), tableButton("skip", "skip", table, sink.name)]));
    }
    for (const [table, why] of Object.entries(sink.lost)) {
      rows.push(waitingRow(sink.name, table, "lost", { message: `${why.message}. ${why.remedy}` }, []));
    }
    for (const table of sink.skipped) {
      rows.push(waitingRow(sink.name, table, "skipped", { message: "Its changes are dropped; resuming refills it." }, [tableButton("resume", "resume", table, sink.name)]));
    }
  }
  $("waiting").hidden = !rows.length;
  const table = $("waiting-tables");
  table.tHead.replaceChildren(headRow([["where", ""], ["table", ""], ["state", ""], ["why", ""], ["", ""]]));
  refill(table.tBodies[0], ...rows);
}

function waitingRow(where, table, state, why, buttons) {
  return make("tr", {}, make("td", {}, where), make("th", { scope: "row" }, table), make("td", { class: state === "skipped" ? "slow" : "bad" }, state),
    make("td", { class: "long" }, why.message || ""), make("td", { class: "buttons" }, ...buttons));
}

function tableButton(verb, label, target, sink) {
  const button = make("button", { type: "button", "data-id": `${verb} ${target} ${sink}`, "aria-label": `${label} ${target} in ${sink}` }, label);
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled")) return;
    button.setAttribute("aria-disabled", "true"); // a disabled button would lose the focus
    const { status, body } = await post(`v1/${verb}`, { target, sink });
    const done = verb === "skip" ? `${sink} skips ${target}.` : `${target} is retried in ${sink}.`;
    $("waiting-answer").textContent = status === 200 ? done : body.error;
    await refresh();
  });
  return button;
}

function drawViews(flow) {
  $("views").hidden = !flow.views.length;
  const table = $("view-list");
  table.tHead.replaceChildren(headRow([["view", ""], ["kind", ""], ["state", ""], ["rows", "number"], ["state size", "number"], ["reflects", ""], ["lag", "number"], ["why", ""]]));
  refill(table.tBodies[0], ...flow.views.map((view) => make("tr", {},
    make("th", { scope: "row" }, view.name), make("td", {}, view.kind),
    make("td", { class: view.state === "live" ? "good" : view.state === "failed" ? "bad" : "slow" }, view.state),
    make("td", { class: "number" }, number(view.rows)), make("td", { class: "number" }, bytes(view.state_bytes)),
    make("td", {}, view.lsn), make("td", { class: `number ${view.lag_seconds > 30 ? "slow" : ""}` }, view.lag_seconds > 0.5 ? duration(view.lag_seconds) : "–"),
    make("td", { class: "long" }, view.message))));
}

function drawProgress(flow) {
  const lines = [];
  if (flow.capture === "snapshot" && flow.snapshot.table) {
    const at = flow.snapshot;
    lines.push(bar(`First snapshot: ${at.table}, ${number(at.rows)} of about ${number(at.estimate)} rows; ${at.tables_done} of ${at.tables} tables done`, at.rows, at.estimate));
  }
  for (const job of flow.backfills) {
    const rows = job.rows || 0, estimate = job.estimate || 0;
    const [value, most] = job.state === "done" ? [1, 1] : [rows, estimate];
    lines.push(bar(`Backfill ${job.id || ""} of ${job.table || (job.tables || []).join(", ")}: ${job.state || ""}, ${number(rows)} rows`, value, most));
  }
  $("progress").hidden = !lines.length;
  $("progress-list").replaceChildren(...lines);
}

function bar(text, value, most) {
  const gauge = make("progress", most ? { max: most, value: Math.min(value, most) } : {});
  gauge.setAttribute("aria-label", text);
  return make("li", {}, text, gauge);
}

function drawTables(flow) {
  const sinks = flow.sinks.map((sink) => sink.name);
  const heads = [["table", ""], ["captured", "number"], ...sinks.map((name) => [name, "number"]), ["lag", "number"], ["", ""]];
  const paused = new Set(flow.sinks.flatMap((sink) => sink.held));
  const waits = (table) => flow.sinks.filter((sink) => table in sink.waiting).map((sink) => sink.name).join(", ");
  const rows = Object.entries(flow.tables).map(([table, one]) => {
    const ops = Object.entries(one.captured).map(([op, count]) => `${number(count)} ${OPS[op] || op}`).join(", ");
    const total = Object.values(one.captured).reduce((sum, count) => sum + count, 0);
    const behind = Math.max(0, ...Object.values(one.lag_seconds));
    return make("tr", {}, make("th", { scope: "row" }, table),
      make("td", { class: "number", title: ops }, number(total)),
      ...sinks.map((name) => make("td", { class: "number" }, number(one.applied[name]))),
      make("td", { class: `number ${behind > 30 || waits(table) ? "slow" : ""}` },
        paused.has(table) ? "paused" : waits(table) ? `waiting in ${waits(table)}` : behind > 0.5 ? duration(behind) : "–"),
      make("td", {}, pauseButton(table, paused.has(table))));
  });
  const table = $("tables");
  table.tHead.replaceChildren(headRow(heads));
  refill(table.tBodies[0], ...rows);
  $("table-names").replaceChildren(...Object.keys(flow.tables).map((name) => make("option", { value: name })));
}

const headRow = (heads) => make("tr", {}, ...heads.map(([name, kind]) =>
  name ? make("th", { scope: "col", class: kind }, name) : make("td", {})));

function drawLetters(found) {
  const table = $("letters");
  table.hidden = !found.letters.length;
  if (!found.letters.length) { $("letters-answer").textContent = "None: the stores have accepted every change."; return; }
  const shown = found.letters.length < found.total ? `, the newest ${found.letters.length} shown` : "";
  const text = `${number(found.total)} dead letter(s)${shown}. For their keys: millrace dlq list`;
  if (!$("letters-answer").dataset.kept) $("letters-answer").textContent = text;
  table.tHead.replaceChildren(headRow([["sink", ""], ["table", ""], ["LSN", ""], ["reason", ""], ["attempts", "number"], ["since", ""], ["", ""]]));
  refill(table.tBodies[0], ...found.letters.map((one) => make("tr", {},
    make("td", {}, one.sink), make("td", {}, one.table), make("td", {}, one.lsn), make("td", { class: "long" }, one.reason),
    make("td", { class: "number" }, number(one.attempts)), make("td", {}, one.parked_at.replace("T", " ").slice(0, 19)),
    make("td", {}, retryButton(one)))));
}

function retryButton(one) {
  const name = `${one.sink} ${one.table} ${one.lsn}`;
  const button = make("button", { type: "button", "data-id": `retry ${name}`, "aria-label": `retry ${name}` }, "retry");
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled")) return;
    button.setAttribute("aria-disabled", "true"); // a disabled button would lose the focus
    const { status, body } = await post("v1/dead-letters/retry", { sink: one.sink, table: one.table, lsn: one.lsn });
    const answer = $("letters-answer");
    answer.textContent = status === 200 ? `${body.asked} dead letter(s) will be retried.` : body.error;
    answer.dataset.kept = "yes";
    setTimeout(() => { delete answer.dataset.kept; }, 6000);
    await refresh();
  });
  return button;
}

// -- why

$("why").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  $("why-answer").textContent = "Searching the log…";
  const { status, body } = await ask(`v1/why?${new URLSearchParams({ table: form.get("table"), key: form.get("key") })}`);
  const table = $("why-events");
  table.hidden = status !== 200 || !body.events.length;
  $("why-stores").hidden = status !== 200;
  if (status !== 200) { $("why-answer").textContent = body.error; return; }
  $("why-answer").textContent = body.events.length ? `${body.events.length} event(s) in the log.` : "The log has no event of this key.";
  const sinks = [...new Set(body.events.flatMap((one) => Object.keys(one.sinks)))];
  table.tHead.replaceChildren(headRow(["what", "at", "transaction", "commit", "version", "log entry", "schema", ...sinks].map((name) => [name, ""])));
  table.tBodies[0].replaceChildren(...body.events.map(({ event: one, entry, sinks: outcome, batches }) => make("tr", {},
    make("td", {}, OPS[one.op] + (one.unchanged ? `, ${one.unchanged} column(s) not sent` : "")),
    make("td", {}, one.commit_ts.slice(0, 23)), make("td", {}, `${one.xid} · ${one.ordinal}`), make("td", {}, one.commit_lsn),
    make("td", {}, one.version), make("td", {}, entry), make("td", {}, String(one.schema_id)),
    ...sinks.map((name) => make("td", { class: outcome[name] === "applied" ? "good" : "slow" }, outcomeText(outcome[name], batches[name]))))));
  $("why-stores").tHead.replaceChildren(headRow(["store", "state", "version", "place"].map((name) => [name, ""])));
  $("why-stores").tBodies[0].replaceChildren(...Object.entries(body.stored).map(([name, found]) => make("tr", {},
    make("td", {}, name), make("td", { class: found.state === "unknown" ? "slow" : "" }, found.state),
    make("td", {}, found.version || "–"), make("td", {}, found.place || found.trouble))));
});

function outcomeText(outcome, batch) {
  if (outcome !== "applied") return outcome || "–";
  if (!batch) return "applied, batch not recorded";
  return `applied, batch ${batch.first === batch.last ? batch.first : `${batch.first} to ${batch.last}`}`;
}

// -- the loop

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = new FormData(event.target).get("token");
  sessionStorage.setItem("millrace-token", token);
  refresh();
});

async function refresh() {
  try {
    const [ready, flow, history, letters] = await Promise.all([ask("readyz"), ask("v1/flow"), ask("v1/history"), ask("v1/dead-letters")]);
    $("token").hidden = true;
    $("main").hidden = false;
    drawReasons(ready.body.reasons, flow.body.sinks);
    drawFlow(flow.body);
    drawWaiting(flow.body);
    drawViews(flow.body);
    drawProgress(flow.body);
    drawTables(flow.body);
    drawPlots(history.body);
    drawLetters(letters.body);
    $("age").textContent = `at ${new Date().toLocaleTimeString("en-GB")}`;
  } catch (error) {
    const locked = error instanceof NeedsToken;
    $("token").hidden = !locked;
    $("main").hidden = locked;
    showVerdict(locked ? "A token is needed" : "The daemon does not answer", "bad");
  }
}

refresh();
setInterval(() => { if (!document.hidden) refresh(); }, 2000);
