// What is checked of the scripts of src/.  .ci/run does it; by hand, in the repository's top folder, once .ci/run has
// installed ESLint (--fix mends the format):
//     tests/lint/node_modules/.bin/eslint -c tests/lint/eslint.config.mjs --fix src

import fs from 'node:fs';
import path from 'node:path';
import js from '@eslint/js';
import stylistic from '@stylistic/eslint-plugin';
import globals from 'globals';

// The scripts of the page share their globals.  So they are checked as the one script that build.py makes of them, in
// the order of page.html: once, and each file is told what was found in its lines.
let checked = {};                               // {text, messages} of the script that was checked last
let part;                                       // the joined script, and where the file that is asked for lies in it
const joined = {
  meta: {name: 'joined'},
  supportsAutofix: true,                        // for --fix

  preprocess(own, file) {
    const folder = path.dirname(file), page = fs.readFileSync(path.join(folder, 'page.html'), 'utf8');
    const names = [...page.matchAll(/^<script src="(.+)"><\/script>$/gm)].map(([, name]) => name);
    const at = names.indexOf(path.basename(file));
    if (at < 0) throw new Error(`${file}: page.html does not name it`);
    const texts = names.map((name, index) => index === at ? own : fs.readFileSync(path.join(folder, name), 'utf8'));
    const text = texts.join(''), count = (piece) => piece.split('\n').length - 1;
    const before = texts.slice(0, at).join('');
    part = {text, offset: before.length, first: count(before), last: count(before) + count(own)};
    return [text === checked.text ? '' : text];
  },

  postprocess([messages]) {
    const {text, offset, first, last} = part;
    if (text !== checked.text) checked = {text, messages};
    return checked.messages.filter(({line}) => line > first && line <= last).map((message) => ({...message,
      message: message.message.replace(/ on line \d+ column \d+/, ''),         // of the joined script
      line: message.line - first, endLine: message.endLine && message.endLine - first, suggestions: undefined,
      fix: message.fix && {...message.fix, range: message.fix.range.map((index) => index - offset)}}));
  }
};

export default [
  js.configs.recommended,
  stylistic.configs.customize({semi: true, arrowParens: true, commaDangle: 'never', quoteProps: 'as-needed',
    braceStyle: '1tbs'}),
  {
    languageOptions: {sourceType: 'script'},
    rules: {
      // A name means one thing: no local one hides a global of the page, as `pause` or `merge`.
      'no-shadow': 'error',
      'no-unused-vars': ['error', {ignoreRestSiblings: true, argsIgnorePattern: '^_'}],
      'no-control-regex': 'off',                // logs have control characters
      'eqeqeq': 'error',
      'no-var': 'error',
      'prefer-const': ['error', {destructuring: 'all'}],
      'object-shorthand': 'error',
      'no-else-return': 'error',

      '@stylistic/max-len': ['error', {code: 120}],
      '@stylistic/quotes': ['error', 'single', {avoidEscape: true}],
      '@stylistic/no-multi-spaces': ['error', {ignoreEOLComments: true}],       // comments stand below each other
      '@stylistic/brace-style': ['error', '1tbs', {allowSingleLine: true}],
      // What fits into one line stays in one.
      '@stylistic/max-statements-per-line': ['error', {max: 4}],
      '@stylistic/multiline-ternary': 'off',
      '@stylistic/indent-binary-ops': 'off',
      '@stylistic/no-mixed-operators': 'off',
      '@stylistic/object-curly-spacing': ['error', 'never']
    }
  },
  {
    files: ['src/page/*.js'],
    plugins: {page: {processors: {joined}}},
    processor: 'page/joined',
    languageOptions: {globals: {...globals.browser, CAUSE_ROWS: 'readonly', FORM_ROWS: 'readonly', SHOW_ROWS: 'readonly'}}
  },
  {files: ['src/server/*.js'], languageOptions: {globals: globals.serviceworker}}
];
