// The page: what is asked is in the URL; each change asks the server anew and draws its answers.
import { show as dialog, surround } from "./chrome.js";
import { $, el } from "./dom.js";
import { panels } from "./draw.js";
import { controls, fill, mark, showMachine, unfold } from "./form.js";
import { devices } from "./parts.js";
import { OF_TRAINING, command, empty, question, read, write } from "./state.js";

const KINDS = ["describe", "serve", "train", "curves", "ranks"];
const WAIT = 150; // ms of typing before a question
const LONGEST_LENGTHS = 500000; // bytes
let state = empty(), catalogue = null, sizes = [], latest = {}, asking = 0, timer = 0, stop = new AbortController();

async function fetched(path, body) {
  const sent = body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: stop.signal };
  const response = await fetch(path, sent);
  const text = await response.text();
  const document = JSON.parse(text);
  if (document.error) throw Object.assign(new Error(document.error.message), { field: document.error.field });
  return { document, text };
}

// Returns the documents of the question, and the messages of those that have none.
async function documents(kinds, changed) {
  const found = {}, texts = {}, problems = [];
  await Promise.all(kinds.map(async (kind) => {
    try {
      const { document, text } = await fetched(`api/${kind}`, question(state, kind, changed));
      found[kind] = document;
      texts[kind] = text;
    } catch (error) {
      problems.push({ kind, field: error.field ?? "", message: error.message });
    }
  }));
  return { found, texts, problems };
}

async function ask() {
  const mine = (asking += 1);
  stop.abort(); // what was asked before is not waited for
  stop = new AbortController();
  $("status").textContent = "computing …";
  $("panels").classList.add("stale");
  const moved = Object.keys(state.set).length > 0;
  await fields(mine);
  const [now, before] = await Promise.all([documents(KINDS, true), moved ? documents(KINDS, false) : null]);
  if (mine !== asking) return;
  const old = before && before.found.describe ? before.found : null;
  shown(now, old);
  const slow = [state.serving.search && now.found.serve && "layouts", state.training.search && now.found.train && "ranked"].filter(Boolean);
  if (slow.length) {
    $("status").textContent = "ranking layouts …";
    const more = await documents(slow, true);
    if (mine !== asking) return;
    const found = { ...now.found, serve: more.found.layouts ?? now.found.serve, train: more.found.ranked ?? now.found.train };
    shown({ found, texts: { ...now.texts, ...more.texts }, problems: [...now.problems, ...more.problems] }, old);
  }
  $("status").textContent = "";
  document.body.dataset.drawn = String(mine);
}

function shown(now, old) {
  latest = now;
  report(now.problems);
  draw(now.found, old);
  $("panels").classList.remove("stale");
}

function report(problems) {
  const said = [...new Set(problems.map((one) => one.message))];
  $("problems").replaceChildren(...said.map((message) => el("p", { class: "problem" }, el("b", {}, "✗ "), message)));
  mark(problems, OF_TRAINING);
}

function draw(now, before) {
  const opened = [...document.querySelectorAll('[aria-expanded="true"]')].map((one) => one.closest("tr").dataset.figure);
  $("panels").replaceChildren(...panels(now, before, open));
  for (const figure of opened.filter(Boolean)) document.querySelector(`[data-figure="${figure}"] .open`)?.click();
  const name = state.model || "config.json";
  $("question").textContent = now.serve ? `${name} on ${devices(now.serve)} × ${now.serve.machine}, ${now.serve.context.toLocaleString("en-US")} tokens per user` : name;
  document.title = `${name} · asbuilt`;
}

function open(title, kind) {
  dialog(title, kind === "config" ? latest.config : latest.texts[kind], command(state, kind));
}

// ---- the form

const { text } = controls(change);

function show() {
  $("model").value = state.model;
  for (const input of $("form").querySelectorAll('[id^="serving-"], [id^="training-"]')) {
    const [where, ...rest] = input.id.split("-");
    const value = state[where][rest.join("-")] ?? "";
    if (input.id === "serving-gpu") continue;
    if (input.tagName === "SELECT" && value && ![...input.options].some((one) => one.value === value)) input.append(el("option", { value }, value));
    if (input.type === "checkbox") input.checked = value === input.value;
    else input.value = value || (input.tagName === "SELECT" ? input.options[0].value : "");
  }
  showMachine(state.serving.gpu ?? "", catalogue);
  lengths();
  unfold();
}

function lengths() {
  const lines = (state.serving.lengths ?? "").split("\n").filter((line) => line.trim()).length;
  $("lengths-row").hidden = !lines;
  $("lengths-said").textContent = `${lines.toLocaleString("en-US")} lines`;
  if (!lines) $("lengths").value = "";
}

// The sizes of the model's config that can be changed; they differ by family.
async function fields(mine) {
  try {
    const asked = (changed) => fetched("api/config", question(state, "config", changed));
    const { document } = await asked(true).catch(() => asked(false)); // a change that is refused shows the rest
    if (mine !== asking) return;
    const same = sizes.length === document.editable.length && sizes.every((one, i) => one.key === document.editable[i].key);
    sizes = document.editable;
    if (!same) $("sizes").replaceChildren(...sizes.map(size));
    if (state.config === null) state.model = document.name;
  } catch {
    sizes = [];
    $("sizes").replaceChildren();
  }
  for (const one of sizes) {
    const input = $(`set-${one.key}`), value = state.set[one.key] ?? String(one.now), changed = one.key in state.set || one.now !== one.value;
    if (document.activeElement !== input) input.value = value;
    input.closest("label").classList.toggle("changed", changed);
    input.closest("label").querySelector("small").textContent = changed ? `was ${one.value.toLocaleString("en-US")}${one.key in state.set ? "" : ", follows"}` : "";
  }
  $("changes").hidden = sizes.length === 0;
}

function size(one) {
  const label = text(one.label, one.key, "set", one.key, { inputmode: "numeric" });
  label.title = one.key;
  label.append(el("small", {}));
  return label;
}

function change(where, key, value) {
  const was = sizes.find((one) => one.key === key);
  if (value === "" || (where === "set" && String(was?.value) === value)) delete state[where][key];
  else state[where][key] = value;
  unfold();
  later();
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    remember();
    ask();
  }, WAIT);
}

function remember() {
  const hash = write(state);
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

// A file of lengths is sent with each question, so it is far below what the server takes.
async function takeLengths(file) {
  try {
    if (file.size > LONGEST_LENGTHS) throw new Error("larger than 500 kB: give it to `asbuilt plan serve --lengths`");
    state.serving.lengths = await file.text();
    if (!state.serving.lengths.trim()) throw new Error("it is empty");
    show();
    later();
  } catch (error) {
    delete state.serving.lengths;
    show();
    report([{ kind: "", field: "lengths", message: `${file.name}: no lengths: ${error.message}` }]);
  }
}

async function take(file) {
  try {
    if (file.size > 1 << 20) throw new Error("larger than 1 MiB");
    const config = JSON.parse(await file.text());
    state = { ...state, config, set: {}, model: file.name.replace(/\.json$/, "") || "config" };
    show();
    later();
  } catch (error) {
    report([{ kind: "", field: "config", message: `${file.name}: not a config.json: ${error.message}` }]);
  }
}

function listen() {
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("model").addEventListener("change", (event) => {
    state = { ...state, model: event.target.value.trim(), config: null, set: {} };
    later();
  });
  $("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      const file = name === "drop" && event.dataTransfer.files[0];
      for (const id of ["drop", "lengths-drop"]) $(id).classList.toggle("over", name === "dragover");
      if (file) (event.target.closest?.("#lengths-drop") || !/\.json$/i.test(file.name) ? takeLengths : take)(file);
    });
  }
  $("panels").addEventListener("use", ({ detail: { where, values } }) => {
    for (const [key, value] of Object.entries(values)) {
      if (value === "") delete state[where][key];
      else state[where][key] = String(value);
    }
    show();
    later();
  });
  $("lengths").addEventListener("change", (event) => event.target.files[0] && takeLengths(event.target.files[0]));
  $("lengths-drop-it").addEventListener("click", () => {
    change("serving", "lengths", "");
    lengths();
    $("lengths").focus();
  });
  $("undo").addEventListener("click", () => {
    state.set = {};
    later();
  });
  $("config").addEventListener("click", async () => {
    try {
      latest.config = JSON.stringify((await fetched("api/config", question(state, "config"))).document.config, null, 2);
      open("The changed model", "config");
    } catch (error) {
      report([{ kind: "", field: error.field ?? "", message: error.message }]);
    }
  });
  window.addEventListener("hashchange", () => {
    state = read(location.hash);
    start();
  });
}

function start() {
  if (!state.model && state.config === null) state.model = catalogue.given ?? "llama-3-8b";
  show();
  remember();
  ask();
}

surround();
state = read(location.hash);
catalogue = (await fetched("api/catalogue")).document;
fill(catalogue, change, (gpu) => {
  change("serving", "gpu", gpu);
  showMachine(gpu, catalogue);
});
listen();
start();
