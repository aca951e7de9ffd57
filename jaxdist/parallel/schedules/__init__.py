"""Pipeline schedules as data: tables, those that have a name, the proof that they can run."""
