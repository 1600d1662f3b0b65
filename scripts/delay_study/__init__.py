"""Study of delays: many training runs from one file, and what they say (scripts/reproduce_delay_table.py)."""
