// ---- The text of logs.  16 colours; of a progress bar what it shows last.  Other escapes are dropped.

// colours and the like; OSC; DCS and the like; other escapes; an escape that is incomplete; text
const TOKENS = new RegExp([/\x1b\[([0-?]*)[ -/]*([@-~])/, /\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/,
  /\x1b[PX^_][^\x1b]*\x1b\\/, /\x1b[ -/]*[0-OQ-WYZ`-~]/, /\x1b[^\x07]*$/, /([^\x00-\x08\x0a-\x1f\x7f]+)/]
  .map((part) => part.source).join('|'), 'g');
const STYLES = [/^(1|22)$/, /^2?4$/, /^[39]\d$/];               // one code of each is in force
const ADDRESS = /(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}])/;

function restyle(style, parameters) {           // a style: the codes in force; 256 colours and more are not shown
  for (const code of parameters.replace(/[34]8;(5;\d+|2;\d+;\d+;\d+)/g, '39').split(';').map(Number)) {
    const rivals = STYLES.find((each) => each.test(code));
    if (!code) style = [];
    else if (rivals) style = [...style.filter((each) => !rivals.test(each)), code];
  }
  return style;
}

function renderLine(raw, style) {               // what a line shows, as [[text, classes]]; and the style at its end
  const runs = [];
  for (const [, parameters, final, text] of raw.replace(/\r+$/, '').split('\r').at(-1).matchAll(TOKENS)) {
    if (final === 'm') style = restyle(style, parameters);
    else if (text) runs.push([text, style.map((code) => `sgr${code}`).join(' ')]);
  }
  return [runs, style];
}

function lineNode(runs, kind, at) {             // a line of a log
  const link = (text) => text.split(ADDRESS).map((part, index) => index % 2
    ? el('a', {href: part, target: '_blank', rel: 'noopener noreferrer'}, part) : part);
  return el('div', {class: kind, 'data-at': at},
    ...runs.map(([text, classes]) => classes ? el('span', {class: classes}, link(text)) : link(text)));
}

// stdout and stderr are parsed separately: a progress bar on one does not run into lines on the other.
class LogSource {
  constructor(kind) {
    Object.assign(this, {kind, offset: 0, raw: '', style: []});
  }

  feed(text) {                                  // returns the completed lines
    const lines = (this.raw + text).split('\n'), last = lines.pop();
    this.raw = last;
    if (last.length > LINE_LENGTH) {            // of a progress bar, keep only what it shows now
      this.raw = last.slice(Math.max(0, last.lastIndexOf('\r', last.length - 2))).slice(0, LINE_LENGTH);
    }
    return lines.map((raw) => {
      const [line, style] = this.render(raw.slice(0, LINE_LENGTH));
      this.style = style;
      return line;
    });
  }

  render(raw) {                                 // a line, and the style at its end; a progress bar is no error
    const [runs, style] = renderLine(raw, this.style);
    return [[runs, /\r./.test(raw) ? null : this.kind], style];
  }
}
