"""The backend as a service: jobs, queue, worker processes, events and artifacts over HTTP; see README.md in this folder."""
