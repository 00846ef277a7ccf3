"""What can be set, with units and defaults, and why a value is refused. No torch here.

schema.py    every setting
load.py      YAML file + dotted overrides -> Config, or one error that lists all problems
names.py     the schema as dotted names: look-up, nearest name, what may change on resume
template.py  a commented YAML file to start from
resolve.py   Config + the target's config.json -> DrafterSpec
spec.py      DrafterSpec: a drafter's architecture, every field known
"""
