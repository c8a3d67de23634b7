//! Every text of the pages, in English and Spanish. A text without a translation does not compile.

/// A language of the pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Language {
    English,
    Spanish,
}

impl Language {
    pub fn from_code(code: &str) -> Option<Language> {
        match code {
            "en" => Some(Language::English),
            "es" => Some(Language::Spanish),
            _ => None,
        }
    }

    pub fn code(self) -> &'static str {
        match self {
            Language::English => "en",
            Language::Spanish => "es",
        }
    }

    pub fn texts(self) -> &'static Texts {
        match self {
            Language::English => &ENGLISH,
            Language::Spanish => &SPANISH,
        }
    }
}

macro_rules! texts {
    ($($name:ident: $english:literal, $spanish:literal;)*) => {
        /// The texts of one language.
        pub struct Texts {
            language: Language,
            $(pub $name: &'static str,)*
        }

        static ENGLISH: Texts = Texts { language: Language::English, $($name: $english,)* };
        static SPANISH: Texts = Texts { language: Language::Spanish, $($name: $spanish,)* };

        #[cfg(test)]
        const NAMES: &[(&str, &str, &str)] = &[$((stringify!($name), $english, $spanish),)*];
    };
}

texts! {
    // Frame
    pages: "Pages", "Páginas";
    skip_to_content: "Skip to the content", "Ir al contenido";
    something_is_wrong: "Something went wrong", "Algo no va bien";
    not_found: "Not found", "No encontrado";
    no_such_page: "There is no page at this address.", "No hay ninguna página en esta dirección.";
    live: "live", "en directo";
    not_live: "not live", "sin conexión en directo";
    theme_auto: "System", "Sistema";
    theme_light: "Light", "Claro";
    theme_dark: "Dark", "Oscuro";
    preferences: "Language and theme", "Idioma y tema";
    log_in: "Log in", "Iniciar sesión";
    log_in_help: "Enter an API key with the scope read. Create one with: faena keys create NAME --scopes admin", "Introduce una clave de API con el permiso read. Para crear una: faena keys create NOMBRE --scopes admin";
    log_out: "Log out", "Cerrar sesión";
    api_key: "API key", "Clave de API";
    key_not_valid: "this API key is not valid", "esta clave de API no es válida";
    previous: "Previous", "Anterior";
    next: "Next", "Siguiente";
    of: "of", "de";
    all: "all", "todas:";
    details: "Details", "Detalles";
    go_back: "Go back", "Volver";
    save: "Save", "Guardar";
    saved: "saved", "cambios guardados";
    select: "Select", "Seleccionar";
    copy: "Copy", "Copiar";
    copied: "Copied", "Copiado";
    no_such_action: "there is no such action", "no existe esa acción";
    must_be_a_number: "must be a whole number", "debe ser un número entero";

    // Navigation
    overview: "Overview", "Resumen";
    jobs: "Jobs", "Trabajos";
    queues: "Queues", "Colas";
    schedules: "Schedules", "Planificaciones";
    dead_letters: "Dead letters", "Trabajos fallidos";
    tasks: "Tasks", "Tareas";
    approvals: "Approvals", "Aprobaciones";
    machines: "Machines", "Máquinas";
    workers: "Workers", "Workers";
    limits: "Limits", "Límites";
    events: "Events", "Eventos";
    webhooks: "Webhooks", "Webhooks";
    trace: "Trace", "Traza";
    audit: "Audit log", "Auditoría";
    keys: "API keys", "Claves de API";
    about: "About", "Acerca de";

    payload_is_hidden: "Your API key does not show payloads, results or errors.", "Tu clave de API no muestra los datos de los trabajos ni de las tareas.";
    log_messages_are_hidden: "Your API key does not show the messages of the log.", "Tu clave de API no muestra los mensajes del registro.";

    // Overview
    search_jobs: "Search jobs, tags, ids", "Buscar trabajos, etiquetas, ids";
    needs_attention: "Needs attention", "Requiere atención";
    nothing_needs_attention: "Nothing needs attention right now.", "Ahora mismo no hay nada que requiera tu atención.";
    oldest: "oldest", "espera máxima:";
    oldest_title: "Oldest", "Más antiguo";
    sink_down: "Sink is down:", "Destino caído:";
    breaker_open: "Circuit open for worker", "Circuito abierto del worker";
    schedule_late: "Schedule is late:", "Planificación con retraso:";
    loop_not_healthy: "Loop is not healthy:", "Bucle con problemas:";
    no_worker_for: "No worker runs", "Ningún worker ejecuta";
    queue_paused: "Queue is paused:", "Cola en pausa:";
    waiting_word: "waiting", "en espera";
    waiting: "Waiting", "En espera";
    ready: "Ready to run", "Listos para ejecutarse";
    ready_title: "Ready", "Listos";
    nothing_queued: "nothing queued", "nada en cola";
    running: "Running", "En ejecución";
    finished_per_minute: "Finished per minute", "Terminados por minuto";
    average_of: "average of", "media de";
    not_measured_yet: "not measured yet", "aún sin medir";
    in_the_last_hour: "in the last hour", "en la última hora";
    failed_recently: "Failed, last hour", "Fallidos, última hora";
    last_hour: "last hour", "última hora";
    nothing_finished: "No job has finished in the last hour.", "Ningún trabajo ha terminado en la última hora.";
    wait_p95: "Wait, p95", "Espera, p95";
    times: "Times", "Tiempos";
    this_hour: "this hour", "esta hora";
    wait: "Wait", "Espera";
    run_time: "run", "ejecución:";
    finished_per_hour: "Finished per hour", "Terminados por hora";
    last_hours: "last 30 hours", "últimas 30 horas";
    next_schedules: "Next schedules", "Próximas planificaciones";
    system: "System", "Sistema";
    health: "Health", "Estado";
    database: "Database", "Base de datos";
    loops: "Loops", "Bucles";
    version: "Version", "Versión";

    // Jobs
    new_job: "New job", "Nuevo trabajo";
    edit_job: "Edit job", "Editar trabajo";
    submit_job: "Submit job", "Enviar trabajo";
    job: "Job", "Trabajo";
    kind: "Type", "Tipo";
    state: "State", "Estado";
    queue: "Queue", "Cola";
    attempt: "Attempt", "Intento";
    attempts: "Attempts", "Intentos";
    attempt_word: "attempt", "intento";
    error: "Error", "Error";
    last_error: "last error:", "último error:";
    error_or_progress: "Error or progress", "Error o progreso";
    age: "Age", "Edad";
    ready_to_run: "ready to run", "listo para ejecutarse";
    new_rows: "new", "sin ver";
    filter_by_state: "Filter by state", "Filtrar por estado";
    active_filters: "Filter:", "Filtro:";
    sort: "Sort:", "Orden:";
    sort_newest: "newest", "más recientes";
    sort_oldest: "oldest", "más antiguos";
    sort_changed: "last changed", "último cambio";
    sort_priority: "priority", "prioridad";
    sort_scheduled: "scheduled time", "hora programada";
    clear: "Clear", "Quitar";
    no_job_matches: "No job matches.", "Ningún trabajo coincide.";
    no_jobs: "There are no jobs yet. Submit the first one:", "Todavía no hay trabajos. Envía el primero:";
    retry_selected: "Retry selected", "Reintentar seleccionados";
    cancel_selected: "Cancel selected", "Cancelar seleccionados";
    cancel_selected_question: "Cancel selected", "¿Cancelar los trabajos seleccionados";
    retry_verb: "Retry", "Reintentar";
    cancel_verb: "Cancel", "Cancelar";
    delete_verb: "Delete", "Eliminar";
    filter_for_bulk: "Filter the list to act on all matching jobs.", "Filtra la lista para actuar sobre todos los trabajos que coincidan.";
    examples: "Examples", "Ejemplos";
    count_is_a_lower_bound: "There are at least this many.", "Hay al menos esta cantidad.";
    keyboard: "Keyboard", "Teclado";
    key_search: "search", "buscar";
    key_move: "move down and up", "bajar y subir";
    key_select: "select", "seleccionar";
    key_retry: "retry", "reintentar";
    key_open: "open", "abrir";
    in_queue: "queue", "cola";
    priority: "priority", "prioridad";
    priority_title: "Priority", "Prioridad";
    next_attempt_in: "next attempt in", "próximo intento dentro de";
    next_attempt: "Next attempt", "Próximo intento";
    due_now: "due now", "ya toca";
    why_not_running: "Why is it not running?", "¿Por qué no se ejecuta?";
    why_running: "Why is it not finished?", "¿Por qué no ha terminado?";
    why_failed: "Why did it fail?", "¿Por qué ha fallado?";
    why_cancelled: "Why was it cancelled?", "¿Por qué se canceló?";
    requested_by: "requested by", "lo pidió";
    timeline: "Timeline", "Cronología";
    now: "now", "ahora";
    steps: "Steps", "Pasos";
    steps_help: "kept across attempts", "se conservan entre intentos";
    step_done: "Done", "Hecho";
    errors_of_runs: "Errors of earlier attempts", "Errores de intentos anteriores";
    log: "Log", "Registro";
    oldest_first: "oldest first", "primero los más antiguos";
    newest_first: "newest first", "primero los más recientes";
    payload: "Payload", "Datos";
    result: "Result", "Resultado";
    as_curl: "Submit again with curl", "Enviar de nuevo con curl";
    retry_now: "Retry now", "Reintentar ahora";
    edit: "Edit", "Editar";
    run_again: "Run again with changes", "Repetir con cambios";
    cancel_job_question: "Cancel", "¿Cancelar";
    delete_job_question: "Delete", "¿Eliminar";
    job_was_cancelled: "The job was cancelled.", "El trabajo se ha cancelado.";
    job_was_retried: "The job was retried.", "El trabajo se ha reintentado.";
    job_was_deleted: "The job was deleted.", "El trabajo se ha eliminado.";
    job_was_submitted: "The job was submitted.", "El trabajo se ha enviado.";
    id: "Id", "Id";
    submitted: "Submitted", "Enviado";
    correlation: "Correlation", "Correlación";
    correlation_id: "Correlation id", "Id de correlación";
    scheduled_for: "Scheduled for", "Programado para";
    expires: "Expires", "Caduca";
    finished: "Finished", "Terminado";
    run: "Run", "Ejecución";
    run_number: "Run number", "N.º de ejecución";
    worker: "Worker", "Worker";
    schedule: "Schedule", "Planificación";
    time_limit: "Time limit", "Tiempo máximo";
    concurrency_key: "Concurrency key", "Clave de concurrencia";
    unique_key: "Unique key", "Clave única";
    webhook: "Webhook", "Webhook";
    depends_on: "Depends on", "Depende de";
    needed_by: "Needed by", "Necesario para";
    this_job: "This job", "Este trabajo";
    relation: "Relation", "Relación";
    dependencies: "Dependencies", "Dependencias";
    dependencies_help: "what it needs on the left, what needs it on the right", "a la izquierda, de qué depende; a la derecha, qué depende de él";
    as_a_list: "As a list", "Como lista";
    deleted: "Deleted", "Eliminado";
    event: "Event", "Evento";
    tags: "Tags", "Etiquetas";
    tag: "Tag", "Etiqueta";
    text: "Text", "Texto";
    created_after: "Submitted after", "Enviado después de";
    created_before: "Submitted before", "Enviado antes de";
    more: "more", "más";
    tags_help: "Tags, separated by commas", "Etiquetas, separadas por comas";
    options: "Options", "Opciones";
    name_or_type: "Name (type) of the job", "Nombre (tipo) del trabajo";

    // Queues and limits
    by_priority: "By priority", "Por prioridad";
    per_minute: "Runs/min", "Ejec./min";
    per: "per", "por";
    second: "second", "segundo";
    minute: "minute", "minuto";
    hour: "hour", "hora";
    day: "day", "día";
    settings: "Settings", "Ajustes";
    no_queues: "There are no queues yet. A queue exists once a job names it:", "Todavía no hay colas. Una cola existe desde que un trabajo la nombra:";
    paused: "paused", "en pausa";
    at_its_limit: "at its limit,", "al límite,";
    limit: "limit", "límite";
    strict: "strict", "estricta";
    strict_help: "strict order of priority", "orden estricto de prioridad";
    fair: "fair by key", "equitativa por clave";
    fair_none: "first in, first out", "por orden de llegada";
    fairness: "Order within a priority", "Orden dentro de una prioridad";
    jobs_of_queue: "All jobs", "Todos los trabajos";
    next_ready: "Next ready jobs", "Próximos trabajos listos";
    by_priority_then_age: "by priority, oldest first", "por prioridad, primero los más antiguos";
    share: "Share", "Proporción";
    nothing_runs: "No job is running.", "No hay ningún trabajo en ejecución.";
    nothing_queued_here: "No job is ready to run.", "No hay ningún trabajo listo para ejecutarse.";
    limits_that_apply: "Limits that apply", "Límites que se aplican";
    limit_title: "Limit", "Límite";
    paused_since: "paused since", "en pausa desde";
    by: "by", "por";
    pause: "Pause", "Pausar";
    resume: "Resume", "Reanudar";
    concurrency: "Concurrency", "Concurrencia";
    unlimited: "unlimited", "sin límite";
    scheduled_jobs: "Scheduled", "Programados";
    retrying: "retrying", "en reintento";
    queue_was_paused: "paused", "en pausa";
    queue_was_resumed: "resumed", "reanudada";
    scope: "Scope", "Ámbito";
    name: "Name", "Nombre";
    in_use: "In use", "En uso";
    rate: "Rate", "Ritmo";
    source: "Source", "Origen";
    reached: "Reached", "Alcanzado";
    no_limits: "There are no limits.", "No hay límites.";
    set_limit: "Set a limit", "Fijar un límite";
    empty_is_unlimited: "an empty field means no limit", "un campo vacío significa sin límite";
    rate_help: "Rate, like 100/1m", "Ritmo, como 100/1m";
    remove: "Remove", "Quitar";
    remove_limit_question: "Remove the limit of", "¿Quitar el límite de";
    limit_was_removed: "The limit was removed; the limit in the configuration, if any, applies again.", "Se quitó el límite; vuelve a valer lo que dice la configuración.";

    // Schedules
    rule: "Rule", "Regla";
    explanation: "Description", "Descripción";
    every: "every", "cada";
    next_run: "Next run", "Próxima ejecución";
    last_run: "Last run", "Última ejecución";
    runs: "Runs", "Ejecuciones";
    new_schedule: "New schedule", "Nueva planificación";
    create_schedule: "Create schedule", "Crear planificación";
    cron_expression: "Cron expression", "Expresión cron";
    time_zone: "Time zone", "Zona horaria";
    active: "Active", "Activa";
    disabled: "Disabled", "Desactivada";
    schedule_has_ended: "Finished", "Terminada";
    no_schedules: "There are no schedules yet.", "Todavía no hay planificaciones.";
    next_runs: "Next runs", "Próximas ejecuciones";
    if_it_is_enabled: "if you enable it", "si la activas";
    no_next_runs: "It does not run again.", "No se ejecutará más.";
    tick_history: "Due times and outcomes", "Horas previstas y resultados";
    due: "Due", "Prevista";
    outcome: "Outcome", "Resultado";
    not_fired_yet: "It has not fired yet.", "Todavía no se ha disparado.";
    misfire: "After an outage", "Tras una interrupción";
    overlap: "If still running", "Si aún se está ejecutando";
    trigger: "Run now", "Ejecutar ahora";
    enable: "Enable", "Activar";
    disable: "Disable", "Desactivar";
    delete_schedule_question: "Delete", "¿Eliminar";
    schedule_was_triggered: "A job was created.", "Se ha creado un trabajo.";
    schedule_was_enabled: "The schedule was enabled.", "La planificación se ha activado.";
    schedule_was_disabled: "The schedule was disabled.", "La planificación se ha desactivado.";
    schedule_was_deleted: "The schedule was deleted.", "La planificación se ha eliminado.";
    schedule_was_created: "The schedule was created.", "La planificación se ha creado.";
    edit_schedule: "Edit schedule", "Editar planificación";
    timing: "When it runs", "Cuándo se ejecuta";
    policies: "Policies", "Políticas";
    description: "Description", "Descripción";
    interval: "Or an interval, like 15m or 6h", "O un intervalo, como 15m o 6h";
    start_at: "First due time", "Primera hora prevista";
    end_at: "Last due time", "Última hora prevista";
    dst_gap: "When the clocks skip its time", "Si el cambio de hora se salta su hora";
    dst_overlap: "When its time occurs twice", "Si su hora ocurre dos veces";
    except: "Except (a day, a range or a cron expression per line)", "Excepto (un día, un intervalo o una expresión cron por línea)";
    excluded: "Except", "Excepto";
    jitter: "Random delay per job, up to", "Retraso aleatorio por trabajo, hasta";
    max_runs: "Maximum number of runs", "Número máximo de ejecuciones";
    misfire_grace: "A due time is missed after", "Una hora prevista se pierde tras";
    catch_up_limit: "Maximum number of runs to catch up", "Máximo de ejecuciones que recuperar";
    job_type_if_different: "Type, if different from the name", "Tipo, si es distinto del nombre";
    max_retries: "Maximum number of retries", "Número máximo de reintentos";
    retry_delay: "Delay before the first retry", "Espera antes del primer reintento";
    payload_json: "Payload (JSON)", "Datos (JSON)";
    webhook_url: "Webhook URL", "URL del webhook";
    automatic: "automatic", "automático";
    must_be_a_duration: "must be a duration like 90s, 15m or 6h", "debe ser una duración como 90s, 15m o 6h";
    not_json: "is not valid JSON", "no es JSON válido";

    // Dead letters
    by_type_and_error: "By type and error", "Por tipo y error";
    newest_sample: "of the newest 100", "de los 100 más recientes";
    count: "Count", "Cantidad";
    newest: "Newest", "Más reciente";
    actions: "Actions", "Acciones";
    failed_at: "Failed", "Falló";
    no_dead_letters: "No dead letters: every job that failed was retried successfully, resolved or deleted.", "No hay trabajos fallidos: todos se reintentaron con éxito, se resolvieron o se eliminaron.";

    // Tasks
    task: "Task", "Tarea";
    machine: "Machine", "Máquina";
    next_timer: "Next timer", "Próximo temporizador";
    changed: "Changed", "Último cambio";
    no_approvals: "No task waits for a decision.", "Ninguna tarea espera una decisión.";
    no_tasks: "There are no tasks yet. Create one from a machine:", "Todavía no hay tareas. Crea una a partir de una máquina:";
    created_by: "created by", "creada por";
    created: "Created", "Creada";
    counters: "Counters", "Contadores";
    waits_for: "Waits for", "A la espera de";
    history: "History", "Historial";
    data: "Data", "Datos";
    machine_help: "the current state is highlighted", "el estado actual está resaltado";
    decide: "Decide", "Decidir";
    of_group: "of group", "del grupo";
    comment: "Comment", "Comentario";
    approve: "Approve", "Aprobar";
    reject: "Reject", "Rechazar";
    cancel_task_question: "Cancel", "¿Cancelar";
    task_was_approved: "Your approval was recorded.", "Tu aprobación ha quedado registrada.";
    task_was_rejected: "Your rejection was recorded.", "Tu rechazo ha quedado registrado.";
    task_was_cancelled: "The task was cancelled.", "La tarea se ha cancelado.";
    task_was_paused: "The task was paused.", "La tarea está en pausa.";
    task_was_resumed: "The task was resumed.", "La tarea se ha reanudado.";
    registered_by: "Registered by", "Registrada por";
    registered: "Registered", "Registro";
    no_machines: "There are no machines yet. Register one:", "Todavía no hay máquinas. Registra una:";
    definition: "Definition", "Definición";

    // Workers
    slots_title: "Slots", "Huecos";
    can_run: "Can run", "Puede ejecutar";
    all_of_them: "all", "todas";
    all_events: "all events", "todos los eventos";
    breaker: "Circuit", "Circuito";
    completed: "completed", "completados";
    completed_title: "Completed", "Completados";
    failed: "failed", "fallidos";
    failed_title: "Failed", "Fallidos";
    last_seen: "Last seen", "Última señal";
    no_workers: "There are no workers yet. Start one:", "Todavía no hay workers. Arranca uno:";
    kind_of_worker: "Kind", "Tipo";
    reason: "Reason", "Motivo";
    drain: "Drain", "Vaciar";
    cancel_drain: "Cancel drain", "Cancelar vaciado";
    worker_drains: "The worker gets no more jobs.", "El worker no recibirá más trabajos.";
    worker_resumed: "The worker gets jobs again.", "El worker vuelve a recibir trabajos.";

    // Events and webhooks
    sink: "Sink", "Destino";
    sinks: "Sinks", "Destinos";
    sources_and_inboxes: "Sources and inboxes", "Fuentes y buzones";
    source_kind: "source", "fuente";
    inbox_kind: "inbox", "buzón";
    up: "Up", "Activo";
    down: "Down", "Caído";
    sent: "Sent", "Enviados";
    rejected: "Rejected", "Rechazados";
    rejected_events: "Rejected events", "Eventos rechazados";
    no_rejected_events: "No sink has rejected an event.", "Ningún destino ha rechazado eventos.";
    no_sinks: "There are no sinks. Add one to faena.toml with [[sink]].", "No hay destinos. Añade uno a faena.toml con [[sink]].";
    no_inputs: "There are no sources or inboxes. Add one to faena.toml with [[outbox.source]] or [[inbox]].", "No hay fuentes ni buzones. Añade una fuente a faena.toml con [[outbox.source]], o un buzón con [[inbox]].";
    replay: "Replay", "Reenviar";
    resolve: "Resolve", "Resolver";
    event_was_replayed: "The event will be sent again.", "El evento se volverá a enviar.";
    event_was_resolved: "The event was resolved.", "El evento se ha resuelto.";
    receiver: "Receiver", "Receptor";
    no_webhooks: "No webhooks. A job with a webhookUrl sends one when it finishes.", "No hay webhooks. Un trabajo con webhookUrl envía uno cuando termina.";
    why_not_delivered: "Why is it not delivered?", "¿Por qué no se ha entregado?";
    not_sent_yet: "It has not been sent yet.", "Todavía no se ha enviado.";
    no_answer: "no answer", "sin respuesta";
    time: "Time", "Hora";
    answer: "Answer", "Respuesta";
    duration: "Duration", "Duración";
    body: "Body", "Cuerpo";
    redeliver: "Redeliver", "Reenviar";
    webhook_is_redelivered: "The webhook will be delivered again.", "El webhook se volverá a entregar.";

    // Trace, audit, keys, about
    trace_help: "Enter a correlation id to see everything that has it: jobs, tasks, webhooks, events.", "Introduce un id de correlación para ver los trabajos, tareas, webhooks y eventos que lo tienen.";
    nothing_has_this_id: "Nothing has this correlation id, or it has expired.", "No hay nada con este id de correlación, o ya ha caducado.";
    entries: "Entries", "Entradas";
    repeated_events_left_out: "without events that repeat a log entry", "sin los eventos que repiten una entrada del registro";
    job_or_task: "Job or task", "Trabajo o tarea";
    trace_is_truncated: "Only the first 500 entries are shown.", "Solo se muestran las primeras 500 entradas.";
    actor: "Actor", "Autor";
    action: "Action", "Acción";
    target: "Target", "Objeto";
    no_audit: "Nothing has been changed yet.", "Todavía no se ha modificado nada.";
    scopes: "Scopes", "Permisos";
    scope_read: "see everything except the audit log, keys and rejected events", "ver todo excepto la auditoría, las claves y los eventos rechazados";
    scope_write: "also submit, cancel and retry jobs, change schedules and queues, decide on tasks", "además, enviar, cancelar y reintentar trabajos, modificar planificaciones y colas, decidir sobre tareas";
    scope_worker: "for workers: claim jobs and report on them; sees nothing else", "para workers: recibir trabajos e informar de ellos; no ve nada más";
    scope_admin: "everything, including limits, keys, the audit log and rejected events", "todo, incluidos límites, claves, auditoría y eventos rechazados";
    last_used: "Last used", "Último uso";
    revoked: "Revoked", "Revocada";
    expired: "Expired", "Caducada";
    no_keys: "There are no API keys: every program on this machine has access. Create the first:", "No hay claves de API: cualquier programa de esta máquina puede acceder. Crea la primera:";
    new_key: "New key", "Clave nueva";
    key_is_needed: "From now on every request needs an API key.", "A partir de ahora, cada petición necesita una clave de API.";
    shown_once: "Copy it now: it is not shown again.", "Cópiala ahora: no se volverá a mostrar.";
    create_key: "Create key", "Crear clave";
    change_keys: "Change keys", "Modificar claves";
    without_payloads: "Hide payloads (only with read)", "Ocultar los datos (solo con read)";
    payloads_hidden: "payloads hidden", "datos ocultos";
    only_queues: "Only these queues, separated by commas", "Solo estas colas, separadas por comas";
    rotate: "Rotate", "Rotar";
    revoke: "Revoke", "Revocar";
    revoke_question: "Revoke", "¿Revocar";
    key_was_revoked: "The key was revoked.", "La clave se ha revocado.";
    loop_title: "Loop", "Bucle";
    handled: "Handled", "Procesados";
    last_beat: "Last heartbeat", "Última señal";
    no_loops: "This server runs no loops.", "Este servidor no ejecuta bucles.";
    api_reference: "API reference", "Referencia de la API";
    checks: "Checks", "Comprobaciones";
    nodes: "Nodes", "Nodos";
    node: "Node", "Nodo";
    this_node: "this one", "este";
    started_at: "Started", "Inicio";
    run_checks: "Run the checks", "Ejecutar las comprobaciones";
    checks_started: "The checks are running.", "Las comprobaciones están en marcha.";
    checks_help: "They read the whole database, and run at most once a minute.", "Leen toda la base de datos y se ejecutan como máximo una vez por minuto.";
    never_checked: "This node has checked nothing since it started.", "Este nodo no ha comprobado nada desde que arrancó.";
    nothing_found: "No problems were found.", "No se ha encontrado ningún problema.";
    checks_failed: "The checks failed:", "Las comprobaciones han fallado:";
    last_check: "Last check", "Última comprobación";
    code: "Code", "Código";
    finding: "Finding", "Resultado";
    advice: "What to do", "Qué hacer";
    checks_need_admin: "To see the findings, log in with an API key with the scope admin.", "Para ver los resultados hace falta una clave de API con el permiso admin.";
    configuration: "Configuration", "Configuración";
    key_title: "Key", "Clave";
    value: "Value", "Valor";
    line: "line", "línea";
    needs_admin: "To see the configuration, log in with an API key with the scope admin.", "Para ver la configuración hace falta una clave de API con el permiso admin.";
}

impl Texts {
    pub fn language(&self) -> Language {
        self.language
    }

    /// Returns a name in the quotation marks of the language.
    pub fn quoted(&self, name: &str) -> String {
        match self.language {
            Language::English => format!("“{name}”"),
            Language::Spanish => format!("«{name}»"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_is_empty_and_every_sentence_ends_alike_in_both_languages() {
        for (name, english, spanish) in NAMES {
            assert!(!english.is_empty() && !spanish.is_empty(), "{name}");
            let is_sentence = |text: &str| text.ends_with('.');
            assert_eq!(is_sentence(english), is_sentence(spanish), "{name}: {english} / {spanish}");
        }
    }
}
