// What is asked, kept in the URL behind "#": reading it back restores the page.
export const SERVING = ["gpu", "gpus", "tp", "pp", "ep", "redundant_experts", "node", "network", "host", "engine", "max_num_seqs", "chunk", "dtype", "kv_dtype", "context", "users", "latency_target", "first_token_target",
  "prefill_gpus", "decode_gpus", "kv_transfer", "n_gpu_layers", "n_cpu_moe", "cpu", "kv_host", "lora", "lora_rank", "lora_targets", "prompt", "utilisation", "reserve", "workspace", "overhead", "page", "block_size", "bandwidth_efficiency", "compute_efficiency",
  "targets", "memory", "embedding", "flops", "scores", "count", "windows", "kernel", "input_tokens", "output_tokens", "lengths", "rate", "arrivals", "prefix_share", "speculate", "acceptance", "draft_cost",
  "requests", "seed", "price", "any_vendor", "search"];
export const TRAINING = ["gpus", "batch", "seq", "accumulate", "zero", "tp", "pp", "ep", "cp", "schedule", "dtype", "optimizer", "checkpointing", "tokens", "price", "lora", "targets", "qlora", "gradient_dtype", "offload",
  "loss", "chunked_loss", "documents", "reserve", "master", "tokens_per_step", "hsdp", "interleave", "pad_vocabulary", "expert_nodes", "fp8", "fp8_dispatch", "overlap_experts", "overlap_tensor", "gather_context", "sequence_parallel",
  "divide_vocabulary", "utilisation", "kernel_efficiency", "attention_efficiency", "effective_time", "search"];
const BOTH = ["node", "network", "host"]; // of the machines, asked in both plans
const LONGEST = 30000; // characters of a config or of lengths in a URL

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
  for (const name of SERVING) if (state.serving[name] && state.serving[name].length <= LONGEST) said.set(name, state.serving[name]);
  for (const name of TRAINING) if (state.training[name]) said.set(`train.${name}`, state.training[name]);
  for (const [key, value] of Object.entries(state.set)) said.set(`set.${key}`, value);
  const config = state.config === null ? "" : JSON.stringify(state.config);
  if (config && config.length <= LONGEST) said.set("config", config);
  return `#${said}`;
}

// A machine as it is asked for, of a card, a MIG slice of it, and numbers that replace its own: h100-sxm-3g.40gb,bf16=300T.
export const joined = ({ card, slice, numbers }) => [slice ? `${card}-${slice}` : card, numbers].filter(Boolean).join(",");

export function split(gpu, slices) {
  const [head, ...rest] = gpu.split(",");
  if (head.includes("=")) return { card: "", slice: "", numbers: gpu };
  const pairs = Object.entries(slices).flatMap(([card, profiles]) => profiles.map((slice) => [card, slice]));
  const [card, slice] = pairs.find((pair) => pair.join("-") === head) ?? [head, ""];
  return { card, slice, numbers: rest.join(",") };
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
export const OF_TRAINING = ["train", "ranked", "ranks"];
const quoted = (value) => (/^[\w.,:=/@%+-]+$/.test(value) ? value : `'${String(value).replaceAll("'", "'\\''")}'`);

// One option as it is typed: on or off, or with a value; what is a file there is its text here.
const said = (name, value) => (value === "yes" ? ` --${name}` : value === "no" ? ` --no-${name}` : ` --${name} ${name === "lengths" ? "lengths.txt" : quoted(value)}`);

// The command that prints the document, "" for what no command prints: a model that was changed is its config.json.
export function command(state, kind) {
  if (!(kind in WORDS)) return "";
  const asked = question(state, kind);
  const changed = state.config !== null || Object.keys(state.set).length > 0;
  const options = Object.entries(asked.options ?? {}).map(([name, value]) => said(name.replaceAll("_", "-"), value));
  const gpu = asked.gpu ? ` --gpu ${quoted(asked.gpu)}` : "";
  const search = kind === "layouts" || kind === "ranked" ? " --search" : "";
  return `asbuilt ${WORDS[kind]} ${changed ? "config.json" : quoted(state.model)}${gpu}${options.join("")}${search} --json`;
}
