"""What `headrace doctor` makes of facts about a machine: pure judgements, one finding each. Looks at nothing itself."""
