// Acts, the drawer, questions, the playground. Text from models is only ever set as text, never as markup.
"use strict";
(() => {
  const csrf = document.querySelector('meta[name="csrf"]')?.content ?? "";
  const drawer = document.getElementById("drawer");
  const headers = { "content-type": "application/json", "x-csrf-token": csrf };

  function toast(text, bad = false) {
    const note = document.createElement("p");
    note.textContent = text;
    if (bad) note.className = "bad";
    document.getElementById("toasts").append(note);
    setTimeout(() => note.remove(), bad ? 9000 : 3500);
  }

  function ask(question) {
    const dialog = document.getElementById("ask");
    dialog.querySelector("p").textContent = question;
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((resolve) =>
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
  }

  async function send(method, url, body) {
    const answer = await fetch(url, { method, headers, body, credentials: "same-origin" });
    const value = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(value.error?.message ?? `the daemon answered with status ${answer.status}`);
    return value;
  }

  async function act(button) {
    const { act: method, url, body, ask: question, done } = button.dataset;
    if (question && !(await ask(question))) return;
    button.disabled = true;
    try {
      await send(method, url, body);
      if (done) toast(done);
      if ("reload" in button.dataset) location.reload();
    } catch (error) {
      toast(error.message, true);
    } finally {
      button.disabled = false;
    }
  }

  async function openDrawer(url) {
    const answer = await fetch(url, { credentials: "same-origin" });
    if (!answer.ok) return toast("the details cannot be shown", true);
    drawer.replaceChildren(document.createRange().createContextualFragment(await answer.text()));
    drawer.hidden = false;
    drawer.dataset.url = url;
    drawer.querySelector("[data-close]")?.focus();
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-act],[data-drawer],[data-close],[data-copy],[data-theme-switch],rect[data-owner]");
    if (!target) return;
    if (target.dataset.act) act(target);
    else if ("drawer" in target.dataset) { event.preventDefault(); openDrawer(target.getAttribute("href")); }
    else if ("close" in target.dataset) drawer.hidden = true;
    else if ("copy" in target.dataset) copy(target.dataset.copy);
    else if (target.dataset.owner) openDrawer(`/console/life/${encodeURIComponent(target.dataset.owner)}`);
    else switchTheme();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !drawer.hidden) drawer.hidden = true;
  });
  setInterval(() => {
    if (!drawer.hidden && drawer.dataset.url && !document.hidden && !drawer.matches(":focus-within button:active")) {
      fetch(drawer.dataset.url, { credentials: "same-origin" }).then(async (answer) => {
        if (answer.ok && !drawer.hidden) htmx.swap({ target: drawer, text: await answer.text(), swap: "innerMorph" });
      }).catch(() => {});
    }
  }, 1000);

  function copy(text) {
    navigator.clipboard.writeText(text).then(() => toast("copied"), () => toast("the browser did not allow it", true));
  }

  function switchTheme() {
    const next = { "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme ?? ""];
    if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
    if (next) localStorage.setItem("theme", next); else localStorage.removeItem("theme");
    toast(`theme: ${next || "as the system has it"}`);
  }

  document.querySelector('[data-form="logout"]')?.addEventListener("submit", async (event) => {
    event.preventDefault();
    await fetch("/console/logout", { method: "POST", headers: { "x-csrf-token": csrf }, credentials: "same-origin" });
    location.href = "/console/login";
  });

  document.getElementById("newkey")?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const number = (name) => (form.get(name) ? Number(form.get(name)) : null);
    const limits = { requests_per_minute: number("requests_per_minute"), tokens_per_day: number("tokens_per_day") };
    const body = { name: form.get("name"), scopes: [form.get("scope")], lane: form.get("lane"), limits };
    try {
      const made = await send("POST", "/admin/v1/keys", JSON.stringify(body));
      document.getElementById("madekey").textContent = `${made.key} — copy it now: it is shown this once.`;
    } catch (error) {
      toast(error.message, true);
    }
  });
})();
