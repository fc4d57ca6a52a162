"use strict";

// What is on the page: the conversation so far, the documents in the prompt, and the schemas of the server.
const state = { model: "", schemas: [], documents: [], turns: [], asking: null, layout: 0 };
const $ = (id) => document.getElementById(id);
const INSTRUCTION = "Answer the question using the documents below.";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal };
  const response = await fetch(path, options);
  if (response.ok) return response;
  if (response.status === 401) $("key-field").hidden = false;
  const told = await response.json().catch(() => ({}));
  throw new Error(told.error?.message ?? `the server answered with status ${response.status}`);
}

function showError(error) {
  $("error").hidden = !error;
  $("error").textContent = error ? error.message : "";
}

// What is chosen of a schema.

function chosenSchema() {
  return state.schemas.find((schema) => schema.name === $("schema").value);
}

function showModules() {
  const schema = chosenSchema();
  $("modules").hidden = !schema;
  $("tree").replaceChildren(...(schema ? schema.modules.map((module) => moduleItem(module)) : []));
  showLayout();
}

function moduleItem(module) {
  const depth = module.path.split("/").length - 1;
  const box = make("input", { type: "checkbox", value: module.path });
  box.addEventListener("change", () => tick(module, box.checked));
  const about = make("span", { className: "about" }, `${module.tokens} tokens · ${module.text || "no text of its own"}`);
  const item = make("li", {}, make("label", {}, box, make("span", {}, module.name, about)));
  item.style.marginLeft = `${depth * 1.3}rem`;
  for (const parameter of module.parameters) {
    const input = make("input", { type: "text", placeholder: parameter.default ?? "" });
    input.dataset.needed = String(parameter.default === null);
    input.dataset.target = `${module.path}:${parameter.name}`;
    input.addEventListener("input", showLayout);
    const text = `${parameter.name} (at most ${parameter.length} tokens)`;
    item.append(make("label", { className: "parameter", hidden: true }, text, input));
  }
  return item;
}

function box(path) {
  return [...$("tree").querySelectorAll("input[type=checkbox]")].find((each) => each.value === path);
}

// A module needs those around it; of a union there is one.
function tick(module, on) {
  for (const other of chosenSchema().modules) {
    const inside = other.path.startsWith(`${module.path}/`);
    const around = module.path.startsWith(`${other.path}/`);
    const rival = on && module.union !== null && other.union === module.union && other.path !== module.path;
    if ((!on && inside) || rival) untick(other.path);
    if (on && around && !box(other.path).checked) {
      box(other.path).checked = true;
      tick(other, true);
    }
  }
  for (const each of $("tree").querySelectorAll("input[type=checkbox]")) {
    for (const label of each.closest("li").querySelectorAll(".parameter")) label.hidden = !each.checked;
  }
  showLayout();
}

function untick(path) {
  for (const each of $("tree").querySelectorAll("input[type=checkbox]")) {
    if (each.value === path || each.value.startsWith(`${path}/`)) each.checked = false;
  }
}

function selection() {
  const chosen = { fidelity: $("fidelity").value };
  if (!chosenSchema()) return chosen;
  const inputs = [...$("tree").querySelectorAll(".parameter:not([hidden]) input")].filter((input) => input.value);
  chosen.schema = $("schema").value;
  chosen.imports = [...$("tree").querySelectorAll("input:checked")].map((each) => each.value);
  chosen.arguments = Object.fromEntries(inputs.map((input) => [input.dataset.target, input.value]));
  return chosen;
}

// Documents.

async function addFiles(files) {
  showError(null);
  for (const file of files) {
    const bytes = await file.arrayBuffer();
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
      if (text.includes("\0")) throw new TypeError();
      state.documents = state.documents.filter((each) => each.name !== file.name).concat({ name: file.name, text });
    } catch {
      showError(new Error(`${file.name} is not text in UTF-8, so it was left out`));
    }
  }
  showDocuments();
}

function showDocuments() {
  $("documents").replaceChildren(...state.documents.map((each) => {
    const remove = make("button", { type: "button", "aria-label": `Remove ${each.name}` }, "Remove");
    remove.addEventListener("click", () => {
      state.documents = state.documents.filter((other) => other !== each);
      showDocuments();
      $("files").focus();
    });
    return make("li", {}, each.name, remove);
  }));
  showLayout();
}

function messagesWith(question) {
  const messages = [];
  if (state.documents.length) {
    const texts = state.documents.map((each) => `\n\nDocument: ${each.name}\n${each.text.trim()}\n`);
    messages.push({ role: "system", content: INSTRUCTION + texts.join("") });
  }
  if ($("chat").checked) messages.push(...state.turns);
  if (question) messages.push({ role: "user", content: question });
  return messages;
}

// The strip: where each part of the prompt lies, and whether it is reused.

function seconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`;
}

function label(path) {
  if (path === "") return "new text";
  if (path === "messages") return state.documents.length ? "documents" : "messages";
  return path.split("/").pop();
}

function drawStrip(layout, reused) {
  const length = Math.max(layout.end, 1);
  $("strip").replaceChildren(...layout.parts.map((part) => {
    const hit = reused(part);
    const about = `${label(part.path)}: ${part.tokens} tokens from position ${part.start}, ${hit ? "reused" : "computed"}`;
    const item = make("li", { className: hit ? "cached" : "computed", title: about, "aria-label": about },
      make("span", { "aria-hidden": "true" }, label(part.path)));
    item.style.left = `${(100 * part.start) / length}%`;
    item.style.width = `${(100 * part.tokens) / length}%`;
    return item;
  }));
}

function estimate(ms) {
  return ms === null ? "" : `; a full prefill would take about ${seconds(ms)} (estimate from this server's speed so far)`;
}

// The parameters that still need a value.
function missing() {
  const inputs = [...$("tree").querySelectorAll(".parameter:not([hidden]) input")];
  const needed = inputs.filter((input) => !input.value && input.dataset.needed === "true");
  return needed.map((input) => input.dataset.target.split(":").pop());
}

// Of the text that no module covers, the first part may have been there from the turns before.
const EARLIER = "earlier text";
function withEarlierText(parts, reused, hits) {
  const inModules = parts.filter((part) => hits.get(part.path)).reduce((sum, part) => sum + part.tokens, 0);
  const last = parts.at(-1);
  const tokens = Math.min(reused - inModules, last.tokens);
  if (last.path !== "" || tokens <= 0) return parts;
  const rest = { ...last, start: last.start + tokens, tokens: last.tokens - tokens };
  return [...parts.slice(0, -1), { ...last, path: EARLIER, tokens }, ...(rest.tokens ? [rest] : [])];
}

// Before a question is asked: what is stored of its prompt. Answers that come late are not drawn.
let waiting = 0;
function showLayout() {
  clearTimeout(waiting);
  if (missing().length) {
    $("timing").textContent = `Fill in: ${missing().join(", ")}`;
    return;
  }
  waiting = setTimeout(async () => {
    const number = ++state.layout;
    const question = $("question").value.trim();
    const body = { messages: messagesWith(question || "?"), edge_pc: selection() };
    try {
      const layout = await (await call("/edge_pc/layout", body)).json();
      if (number !== state.layout || state.asking) return;
      drawStrip(layout, (part) => part.stored);
      const stored = layout.parts.filter((part) => part.stored).reduce((sum, part) => sum + part.tokens, 0);
      $("timing").textContent = `${layout.tokens} tokens, ${stored} of them stored${estimate(layout.full_prefill_estimate_ms)}`;
      showError(null);
    } catch (error) {
      if (number === state.layout && !state.asking) $("timing").textContent = error.message;
    }
  }, 200);
}

async function showResult(body, final) {
  const layout = await (await call("/edge_pc/layout", { messages: body.messages, edge_pc: body.edge_pc })).json();
  const report = final.edge_pc;
  const hits = new Map(report.modules.map((module) => [module.path, module.hit]));
  state.layout += 1;
  const reused = final.usage.prompt_tokens_details.cached_tokens;
  layout.parts = withEarlierText(layout.parts, reused, hits);
  drawStrip(layout, (part) => hits.get(part.path) ?? part.path === EARLIER);
  $("timing").textContent =
    `First token after ${seconds(report.ttft_ms)}: ${reused} of ${layout.tokens} tokens reused` +
    `${estimate(report.full_prefill_estimate_ms)}. Then ${report.decode_tokens_per_s} tokens/s.`;
}

// Asking.

function addTurn(role, text) {
  $("empty")?.remove();
  const content = make("span", {}, text);
  $("log").append(make("p", { className: `turn ${role}` }, make("b", {}, role === "user" ? "You" : "Answer"), content));
  $("log").scrollTop = $("log").scrollHeight;
  return content;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function ask(question) {
  clearTimeout(waiting);
  const body = {
    model: state.model, messages: messagesWith(question), edge_pc: selection(), stream: true, temperature: 0,
    stream_options: { include_usage: true },
    max_tokens: Number($("max").value) || 256,
  };
  const asking = new AbortController();
  state.asking = asking;
  setBusy(true);
  showError(null);
  addTurn("user", question);
  const shown = addTurn("assistant", "");
  try {
    let final = null;
    for await (const event of events(await call("/v1/chat/completions", body, asking.signal))) {
      shown.textContent += event.choices[0]?.delta.content ?? "";
      $("log").scrollTop = $("log").scrollHeight;
      if (event.edge_pc) final = { ...final, edge_pc: event.edge_pc };
      if (event.usage) final = { ...final, usage: event.usage };
    }
    if (final?.usage) await showResult(body, final);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    const said = shown.textContent;
    if (said) state.turns.push({ role: "user", content: question }, { role: "assistant", content: said });
    else shown.parentElement.remove();
    state.asking = null;
    setBusy(false);
  }
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("log").setAttribute("aria-busy", String(busy));
}

function stop() {
  state.asking?.abort();
}

function submit() {
  const question = $("question").value.trim();
  if (!question || state.asking) return;
  $("question").value = "";
  ask(question).finally(() => $("question").focus());
}

async function load() {
  try {
    state.model = (await (await call("/health")).json()).model;
    $("model").textContent = `${state.model}, on this machine`;
    state.schemas = (await (await call("/edge_pc/schemas")).json()).schemas;
    const chosen = $("schema").value;
    const options = state.schemas.map((schema) => make("option", { value: schema.name }, schema.name));
    $("schema").replaceChildren($("schema").options[0], ...options);
    $("schema").value = chosen;
    showError(null);
  } catch (error) {
    showError(error);
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("question").addEventListener("input", showLayout);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  stop();
  state.turns = [];
  $("log").replaceChildren();
  showError(null);
  showLayout();
  $("question").focus();
});
$("schema").addEventListener("change", showModules);
$("fidelity").addEventListener("change", showLayout);
$("chat").addEventListener("change", showLayout);
$("key").addEventListener("change", load);
$("files").addEventListener("change", () => { addFiles([...$("files").files]); $("files").value = ""; });
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
}
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  addFiles([...event.dataTransfer.files]);
});
if (matchMedia("(max-width: 51.99rem)").matches) $("settings").open = false;
load();
