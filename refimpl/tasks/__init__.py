"""What the model is asked, and who says whether it was right: prompts with programmatic verifiers.

In reading order: `table` (all tasks by name), `arithmetic`, `strict_json`, `code`, `gym` (the tasks themselves), `pool`
(how answers are scored without trusting them), `jail` (what a process that reads them may still do).

An answer is hostile: it may be megabytes, nest without end, loop for ever, or be a program that looks for the solution.
No answer is looked at in the process of a worker, trainer or validator.
"""
