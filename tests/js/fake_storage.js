// The browser's storage of one origin, which Node does not have.

const kept = new Map();

globalThis.localStorage = {
  getItem: (name) => kept.get(name) ?? null,
  setItem: (name, value) => kept.set(name, String(value)),
  removeItem: (name) => kept.delete(name),
};
