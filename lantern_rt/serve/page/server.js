// What the server says: its models, and the events of a picture that is drawn.

/** An answer that is an error; the message is the server's own line. */
export class ServerError extends Error {
  constructor(status, message, wait) {
    super(wait && !/try again/i.test(message) ? `${message}; try again in ${wait} s` : message);
    this.status = status;
  }
}

const KEY = "lantern-rt-api-key";
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepApiKey = (key) => sessionStorage.setItem(KEY, key);
export const address = (path) => new URL(path, document.baseURI).href;

async function ask(path, options = {}) {
  const headers = options.body instanceof FormData ? {} : { "Content-Type": "application/json" };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  const answer = await fetch(address(path), { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError(0, "The server cannot be reached.");
  });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new ServerError(answer.status, error?.message ?? `The server answered ${answer.status}.`,
    answer.headers.get("Retry-After"));
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** A body as a form with files. */
function form(body, files) {
  const made = new FormData();
  for (const [name, value] of Object.entries({ ...body, ...files })) {
    made.append(name, value instanceof Blob ? value : String(value));
  }
  return made;
}

/** The events of a streamed picture, the error that may be among them thrown. files: of a picture that is changed. */
export async function* draw(body, files, signal) {
  const [kind, sent] = files ? ["edits", form(body, files)] : ["generations", JSON.stringify(body)];
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
      if (!data.trim().startsWith("{")) continue;  // a comment, or a closing word
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(answer.status, event.error.message);
      yield event;
    }
  }
}
