// Requests to the server: its models, and the events of a streamed image.

/** An error response; the message is that of the server. suggestions: prompts that the model knows. */
export class ServerError extends Error {
  constructor(status, { message = `The server answered ${status}.`, suggestions = [] } = {}, wait = null) {
    super(wait && !/try again/i.test(message) ? `${message}; try again in ${wait} s` : message);
    Object.assign(this, { status, suggestions });
  }
}

const KEY = "lantern-rt-api-key";
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepApiKey = (key) => sessionStorage.setItem(KEY, key);
export const address = (path) => new URL(path, document.baseURI).href;

export async function ask(path, options = {}) {
  const headers = options.body instanceof FormData ? {} : { "Content-Type": "application/json" };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  const answer = await fetch(address(path), { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError(0, { message: "The server cannot be reached." });
  });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new ServerError(answer.status, error, answer.headers.get("Retry-After"));
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** Convert a body and files to a form. */
function form(body, files) {
  const made = new FormData();
  for (const [name, value] of Object.entries({ ...body, ...files })) {
    made.append(name, value instanceof Blob ? value : String(value));
  }
  return made;
}

/** Yield the events of a stream; throw an error event. files: image and mask of an edit, else null. */
export async function* draw(endpoint, body, files, signal) {
  const [kind, sent] = files ? ["edits", form(body, files)] : [endpoint, JSON.stringify(body)];
  const answer = await ask(`v1/images/${kind}`, { method: "POST", body: sent, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (!data.trim().startsWith("{")) continue;  // a comment, or `[DONE]`
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(answer.status, event.error);
      yield event;
    }
  }
}
