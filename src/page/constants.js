// ---- Limits, timeouts, and the words and marks of what a job or a GPU can be
'use strict';
const PAGE = 50;                                // rows of a list that are asked for and shown at first
const NEWS_PAUSE_MS = 1500;                     // between an answer with news and the next question
const HIDDEN_PAUSE_MS = 20000;                  // the same for a tab that nobody sees
const ANSWER_MS = 20000, SILENCE_MS = 45000, TRIAL_MS = 60000, DOWNLOAD_MS = 3600000;      // timeouts
const LOG_TAIL = 2000, LOG_MOST = 20000;        // lines of a log at first; with earlier ones
const UNDO_MS = 30000;                          // so long an action can be taken back
const COUNT_PAUSE_MS = 400;                     // after the last key, before a sweep is counted
const RESULTS_PAGE = 200, RESULTS_PAUSE_MS = 5000;              // rows of a group's table; between two questions
const LINE_LENGTH = 20000;                      // characters of a line that are shown
const LOG_PAUSE_MS = 1500;                      // between an answer with more of a log and the next question
const LOG_WAIT_S = 30, LOG_SILENCE_MS = 40000;  // how long the service holds that question; its timeout
const JOB_STALE_MS = 30000;                     // a job without news is loaded again after so long: its use changes
const ANSWER_LENGTH = 200000;                   // characters of an answer that /docs shows
const FINAL = ['completed', 'failed', 'cancelled'];
const PRIORITIES = ['high', 'normal', 'low'];
const SHOWN_FAILURES = 3;                       // more are folded
const MANY_GPUS = 16;                           // more are folded by machine at first
const KINDS = {completed: 'ok', failed: 'bad', cancelled: 'warn', running: 'busy', Available: 'ok', Busy: 'busy',
  Paused: 'warn', 'In use': 'warn', Unavailable: 'warn', Fault: 'bad', Unknown: 'bad'};
const MARKS = {completed: '\u2713', failed: '\u2717', cancelled: '\u2298', running: '\u25b6', pending: '\u2026',
  preempted: '\u21ba'};
const CAUSES = CAUSE_ROWS;                      // {cause of an end: what follows from it}
