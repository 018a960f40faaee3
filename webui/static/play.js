// The playground: one or two models answer the same conversation, as they stream.
"use strict";
(() => {
  const form = document.getElementById("play");
  if (!form) return;
  const csrf = document.querySelector('meta[name="csrf"]').content;
  const turns = document.getElementById("turns");
  const histories = new Map();
  let stop = new AbortController();

  const field = (name) => form.elements[name].value;
  const number = (name) => (field(name) === "" ? undefined : Number(field(name)));

  function body(model, messages) {
    const system = field("system") ? [{ role: "system", content: field("system") }] : [];
    const sure = form.elements.logprobs.checked ? { logprobs: true, top_logprobs: 5 } : {};
    return { model, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true },
      temperature: number("temperature"), max_tokens: number("max_tokens"), seed: number("seed"), ...sure };
  }

  function block(role, name) {
    const part = document.createElement("div");
    part.className = `turn ${role}`;
    const head = document.createElement("p");
    head.className = "head";
    head.textContent = name;
    const text = document.createElement("div");
    text.className = "text";
    part.append(head, text);
    return { part, head, text };
  }

  function addToken(text, piece, logprob) {
    if (logprob === undefined) { text.append(piece); return; }
    const span = document.createElement("span");
    span.textContent = piece;
    span.className = `sure${Math.min(4, Math.floor(Math.exp(logprob.logprob) * 5))}`;
    span.title = logprob.top_logprobs.map((top) => `${(100 * Math.exp(top.logprob)).toFixed(1)} % ${JSON.stringify(top.token)}`).join("\n");
    text.append(span);
  }

  function addReasoning(place, piece) {
    let folded = place.part.querySelector("details");
    if (!folded) {
      folded = document.createElement("details");
      const head = document.createElement("summary");
      head.textContent = "Reasoning";
      folded.append(head, document.createElement("div"));
      place.text.before(folded);
    }
    folded.lastChild.append(piece);
  }

  async function answer(model, messages, place) {
    const began = performance.now();
    let said = "", usage = null, first = null;
    const reply = await fetch("/v1/chat/completions", { method: "POST", signal: stop.signal, credentials: "same-origin",
      headers: { "content-type": "application/json", "x-csrf-token": csrf }, body: JSON.stringify(body(model, messages)) });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        if (!choice) continue;
        if (choice.delta.reasoning_content) addReasoning(place, choice.delta.reasoning_content);
        for (const call of choice.delta.tool_calls ?? []) addReasoning(place, `${call.function.name ?? ""}${call.function.arguments ?? ""}`);
        if (choice.delta.content) {
          first ??= performance.now();
          said += choice.delta.content;
          addToken(place.text, choice.delta.content, choice.logprobs?.content?.[0]);
        }
      }
    }
    const seconds = (performance.now() - (first ?? began)) / 1000;
    const speed = usage && seconds > 0 ? `, ${(usage.completion_tokens / seconds).toFixed(1)} a second` : "";
    if (usage) place.head.textContent += ` · ${usage.prompt_tokens} + ${usage.completion_tokens} tokens${speed}, first after ${((first ?? began) - began).toFixed(0)} ms`;
    return said;
  }

  async function ask(model, message, columns) {
    const history = histories.get(model) ?? [];
    history.push({ role: "user", content: message });
    histories.set(model, history);
    const place = block("assistant", model);
    columns.append(place.part);
    try {
      history.push({ role: "assistant", content: await answer(model, history, place) });
    } catch (error) {
      history.pop();
      const note = document.createElement("p");
      note.className = "error";
      note.textContent = error.name === "AbortError" ? "stopped" : error.message;
      place.part.append(note);
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const message = field("message").trim();
    if (!message) return;
    form.elements.message.value = "";
    stop = new AbortController();
    const models = [field("model"), ...(field("other") ? [field("other")] : [])];
    const mine = block("user", "you");
    mine.text.append(message);
    const columns = document.createElement("div");
    columns.className = "columns";
    turns.append(mine.part, columns);
    await Promise.all(models.map((model) => ask(model, message, columns)));
  });

  form.addEventListener("click", (event) => {
    const what = event.target.dataset?.play;
    if (what === "stop") stop.abort();
    if (what === "clear") { histories.clear(); turns.replaceChildren(); }
    if (what === "curl" || what === "python") copyAs(what);
  });
  form.elements.message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
  });

  function copyAs(what) {
    const messages = [...(histories.get(field("model")) ?? [])];
    if (field("message")) messages.push({ role: "user", content: field("message") });
    const { stream, stream_options, ...fields } = body(field("model"), messages);
    const json = JSON.stringify(fields, null, 1);
    const quoted = json.replaceAll("'", "'\\''");
    const text = what === "curl"
      ? `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json' -d '${quoted}'`
      : `import json\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key="-")\nanswer = client.chat.completions.create(**json.loads(r'''${json}'''))\nprint(answer.choices[0].message.content)`;
    navigator.clipboard.writeText(text);
  }
})();
