"""The workflow `compare_answers`: a judge or a function ranks the answers of an episode."""
