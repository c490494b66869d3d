// What is asked, kept in the URL behind "#": reading it back restores the page.
export const SERVING = ["gpu", "gpus", "tp", "pp", "ep", "node", "network", "engine", "max_num_seqs", "chunk", "dtype", "kv_dtype", "context", "users", "latency_target", "first_token_target",
  "input_tokens", "output_tokens", "rate", "arrivals", "prefix_share", "speculate", "acceptance", "price", "search"];
export const TRAINING = ["gpus", "batch", "seq", "accumulate", "zero", "tp", "pp", "ep", "cp", "schedule", "dtype", "optimizer", "checkpointing", "tokens", "price", "search"];
const BOTH = ["node", "network"]; // of the machines, asked in both plans
const LONGEST = 30000; // characters of a config in a URL

export const empty = () => ({ model: "", config: null, set: {}, serving: { gpu: "h100-sxm" }, training: {} });

export function read(hash) {
  const state = empty();
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const [kind, ...rest] = name.split(".");
    const key = rest.join(".");
    if (name === "model") state.model = value;
    else if (name === "config") state.config = parsed(value);
    else if (kind === "set" && key) state.set[key] = value;
    else if (kind === "train" && TRAINING.includes(key)) state.training[key] = value;
    else if (SERVING.includes(name)) state.serving[name] = value;
  }
  return state;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export function write(state) {
  const said = new URLSearchParams();
  if (state.model) said.set("model", state.model);
  for (const name of SERVING) if (state.serving[name]) said.set(name, state.serving[name]);
  for (const name of TRAINING) if (state.training[name]) said.set(`train.${name}`, state.training[name]);
  for (const [key, value] of Object.entries(state.set)) said.set(`set.${key}`, value);
  const config = state.config === null ? "" : JSON.stringify(state.config);
  if (config && config.length <= LONGEST) said.set("config", config);
  return `#${said}`;
}

// The question of one document, and the command that prints the same.
export function question(state, kind, changed = true) {
  const { gpu, search, ...serving } = state.serving, { search: ranked, ...training } = state.training;
  const asked = { model: state.model || null, set: changed ? state.set : {} };
  if (state.config !== null) asked.config = state.config;
  if (kind === "describe") {
    asked.options = pick(serving, ["dtype", "kv_dtype"]);
  } else if (kind !== "config") {
    asked.gpu = gpu;
    asked.options = OF_TRAINING.includes(kind) ? { ...training, ...pick(serving, BOTH) } : serving;
  }
  return asked;
}

const pick = (from, names) => Object.fromEntries(names.filter((name) => from[name]).map((name) => [name, from[name]]));

const WORDS = { describe: "describe", serve: "plan serve", layouts: "plan serve", train: "plan train", ranked: "plan train" };
const OF_TRAINING = ["train", "ranked", "ranks"];
const quoted = (value) => (/^[\w.,:=/@%+-]+$/.test(value) ? value : `'${String(value).replaceAll("'", "'\\''")}'`);

// The command that prints the document, "" for what no command prints: a model that was changed is its config.json.
export function command(state, kind) {
  if (!(kind in WORDS)) return "";
  const asked = question(state, kind);
  const changed = state.config !== null || Object.keys(state.set).length > 0;
  const options = Object.entries(asked.options ?? {}).map(([name, value]) => ` --${name.replaceAll("_", "-")} ${quoted(value)}`);
  const gpu = asked.gpu ? ` --gpu ${quoted(asked.gpu)}` : "";
  const search = kind === "layouts" || kind === "ranked" ? " --search" : "";
  return `asbuilt ${WORDS[kind]} ${changed ? "config.json" : quoted(state.model)}${gpu}${options.join("")}${search} --json`;
}
