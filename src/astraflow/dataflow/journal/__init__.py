"""The journal: segments, tables, compaction, and the rules by which it is audited."""
