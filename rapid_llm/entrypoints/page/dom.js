/** Elements of this page. What comes from the server goes in as text, so nothing of it is ever read as markup. */

export const byId = (id) => document.getElementById(id);

/** A new element: its tag, its properties (those with a dash are attributes), and what it holds: elements or texts. */
export function make(tag, properties = {}, ...content) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...content);
  return element;
}
