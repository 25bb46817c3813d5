"""A participant of a job: what a pull and a push mean, over all servers, and what overlaps with computing."""
