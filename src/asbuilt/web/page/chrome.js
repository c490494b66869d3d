// What surrounds the figures: the dialog with their JSON, and the theme.
import { $ } from "./dom.js";

export function show(title, text, command) {
  $("dialog-title").textContent = `${title}: JSON`;
  $("command").textContent = command;
  $("json").textContent = text;
  $("copy").textContent = "Copy";
  $("dialog").showModal();
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("json").textContent);
    $("copy").textContent = "Copied";
  } catch { // not allowed here: it is marked, to be copied by hand
    getSelection().selectAllChildren($("json"));
    $("copy").textContent = "Marked";
  }
}

// A file opened from a sandbox has no storage.
function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem("theme", value);
    return localStorage.getItem("theme") ?? "";
  } catch {
    return "";
  }
}

function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}

export function surround() {
  $("close").addEventListener("click", () => $("dialog").close());
  $("copy").addEventListener("click", copy);
  $("theme").value = stored();
  theme($("theme").value);
  $("theme").addEventListener("change", (event) => {
    theme(event.target.value);
    stored(event.target.value);
  });
}
